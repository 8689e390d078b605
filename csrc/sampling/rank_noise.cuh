// The draw where external noise goes by rank in the order "value descending, then index": q[r]
// belongs to the r-th kept token. Ranks are found by sorting the kept tokens, kRankChunk at a time
// from the front of the order, so that shared memory is bounded however many there are.
#pragma once

#include "sampling/radix_descent.cuh"

namespace lmdecode::sampling::cuda_kernels {

// Ascending, in shared memory; size is a power of two. All threads of the block.
__device__ inline void bitonic_sort(Word* list, uint32_t size) {
  for (uint32_t run = 2; run <= size; run *= 2) {
    for (uint32_t step = run / 2; step > 0; step /= 2) {
      __syncthreads();
      for (uint32_t i = threadIdx.x; i < size / 2; i += blockDim.x) {
        const uint32_t low = i / step * step * 2 + i % step;
        const uint32_t high = low + step;
        const Word a = list[low], b = list[high];
        if ((a > b) == ((low & run) == 0)) {
          list[low] = b;
          list[high] = a;
        }
      }
    }
  }
  __syncthreads();
}

struct RankDraw {
  Word best;   // order key of the score, complement of the rank
  Word token;  // whose
  Word has_nan;
};

// `count` tokens are kept.
template <class T>
__device__ RankDraw draw_by_rank(RowCluster& cluster, const RowSlice<T>& slice, uint32_t vocab,
                                 const KeptSet& kept, Word count, const TokenWeight& weight,
                                 float temperature, const float* q, int64_t q_stride, float eps,
                                 uint32_t chunk) {
  RowStorage& storage = cluster.storage();
  RankDraw draw{0, 0, 0};
  TokenRange range{kept};
  for (Word base = 0; base < count; base += chunk) {
    TokenRange part = range;  // the next ones in the order, `chunk` at most
    KeptSet done = kept;
    if (count - base > chunk) {
      const auto chunk_target = [&](Word) { return static_cast<Word>(chunk); };
      const Descent cut =
          descend<false, Order::kValue>(cluster, slice, vocab, range, weight, chunk_target);
      const ValueClass ties_class = class_of(value_of_short_key<T>(cut.key), temperature);
      const float lowest = ties_class.lowest, above = ties_class.above;
      struct Counts {
        Word above;
      } counts{0};
      slice.one_by_one().each([&](float logit, uint32_t token) {
        counts.above += range.contains(logit, token) && logit >= above;
      });
      counts = cluster.reduce(counts, [](Counts a, Counts b) { return Counts{a.above + b.above}; });
      TokenRange ties = range;
      ties.set.lowest = lowest > kept.lowest ? lowest : kept.lowest;
      ties.below = above;
      const Word wanted = chunk - counts.above;
      const Descent last = descend<false, Order::kLowTokenFirst>(
          cluster, slice, vocab, ties, weight, [&](Word) { return wanted; });
      done = {lowest, above, 0, vocab - 1 - last.key};
      part.set.lowest = ties.set.lowest;
    }
    // The first block collects and sorts. Its list lies where the histograms are.
    cluster.sync();
    if (cluster.rank() == 0 && threadIdx.x == 0) storage.ranked_size = 0;
    cluster.sync();
    Word* list = cluster.at_rank(storage.ranked, 0);
    uint32_t* size = cluster.at_rank(&storage.ranked_size, 0);
    slice.one_by_one().each([&](float logit, uint32_t token) {
      if (!part.contains(logit, token) || !done.contains(logit, token)) return;
      const uint32_t key = order_key(tempered(logit, temperature));
      list[atomicAdd(size, 1u)] = static_cast<Word>(~key) << 32 | token;
    });
    cluster.sync();
    if (cluster.rank() == 0) {
      const uint32_t listed = storage.ranked_size;
      uint32_t padded = 2;
      while (padded < listed) padded *= 2;
      for (uint32_t i = listed + threadIdx.x; i < padded; i += blockDim.x)
        storage.ranked[i] = ~Word{0};
      bitonic_sort(storage.ranked, padded);
      for (uint32_t i = threadIdx.x; i < listed; i += blockDim.x) {
        const uint32_t token = static_cast<uint32_t>(storage.ranked[i]);
        const Word rank = base + i;
        const float noise = q[static_cast<int64_t>(rank) * q_stride];
        draw.has_nan |= noise != noise;
        const float score = external_score(weight.weight(slice.of_row(token)), noise, eps);
        const Word best =
            static_cast<Word>(order_key(score)) << 32 | (0xffffffffu - static_cast<uint32_t>(rank));
        if (best > draw.best) {
          draw.best = best;
          draw.token = token;
        }
      }
    }
    cluster.sync();
    range.has_done = true;
    range.done = done;
  }
  return cluster.reduce(draw, [](const RankDraw& a, const RankDraw& b) {
    const bool first = a.best > b.best;
    return RankDraw{first ? a.best : b.best, first ? a.token : b.token, a.has_nan | b.has_nan};
  });
}

}  // namespace lmdecode::sampling::cuda_kernels
