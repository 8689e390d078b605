// The few logits of a row among which something is looked for after a first pass: its k largest, or
// the last one of its top-p.
#pragma once

#include "sampling/radix_descent.cuh"

namespace lmdecode::sampling::cuda_kernels {

// A row that has one logit a thread.
struct LogitsOfThreads {
  float mine;
  template <class See>
  __device__ void each(See see) const {
    see(mine, 0);
  }
};

// Whether the k-th of the threads' largest logits is a bound that few logits of the row reach.
__device__ inline bool tells_a_bound(Word k, uint32_t threads, uint32_t vocab) {
  return 4 * k <= threads && 4 * threads <= vocab;
}

// A logit that at least k of the row reach; -inf: none is known. best: the largest that this thread
// has read, each logit having been read by one. The k-th of these is reached k times, and as each
// thread has logits from everywhere in the row, hardly more often.
template <class T>
__device__ float reached_by(RowCluster& cluster, float best, Word k) {
  // Two digits are enough for a bound: the key without its last bits is a smaller one.
  constexpr int kLeft = kUnusedKeyBits<T> > 10 ? kUnusedKeyBits<T> : 10;
  const Descent cut = descend_keys<false>(
      cluster, LogitsOfThreads{best}, 32 - kLeft,
      [](float logit, uint32_t, uint32_t* key) {
        *key = order_key(logit) >> kLeft;
        return true;
      },
      [](float) { return Word{0}; }, [k](Word) { return k; });
  const uint32_t key = cut.key << kLeft;
  return cut.reached && key > kMinusInfinityKey ? value_of_key(key) : minus_infinity();
}

// Leaves of the slices what each_of(see) calls see(logit, token) for, in the lists of their blocks;
// or leaves all, where some block has more than `room`.
template <class T, class EachOf>
__device__ void keep_listed(RowCluster& cluster, RowSlice<T>& slice, uint32_t room,
                            EachOf each_of) {
  struct Listed {
    Word most, highest, lowest;  // tokens of a block; order keys, the complement of the lowest
  };
  RowList& list = cluster.storage().list;
  __syncthreads();  // what was there has been read
  if (threadIdx.x == 0) list.size = 0;
  __syncthreads();
  uint32_t highest = 0, lowest = 0;
  each_of([&](float logit, uint32_t token) {
    const uint32_t at = atomicAdd(&list.size, 1u);
    if (at >= room) return;
    list.logit[at] = logit;
    list.token[at] = token;
    const uint32_t key = order_key(logit);
    highest = key > highest ? key : highest;
    lowest = ~key > lowest ? ~key : lowest;
  });
  __syncthreads();
  const auto larger = [](Word a, Word b) { return a > b ? a : b; };
  const Listed listed = cluster.reduce(Listed{list.size, highest, lowest}, [&](const Listed& a,
                                                                               const Listed& b) {
    return Listed{larger(a.most, b.most), larger(a.highest, b.highest), larger(a.lowest, b.lowest)};
  });
  if (listed.most > room) return;
  slice.keep(list, ~static_cast<uint32_t>(listed.lowest), static_cast<uint32_t>(listed.highest));
}

// Reduces a row's slices to lists, of at most `room` entries, that hold its k largest logits, if k
// is small against the threads and these against the logits. Else keeps all. best: as of
// reached_by(). lowest_of(logit): the lowest logit that counts as much as this one.
template <class T, class LowestOf>
__device__ void keep_largest(RowCluster& cluster, RowSlice<T>& slice, uint32_t vocab, float best,
                             Word k, int room, LowestOf lowest_of) {
  if (!tells_a_bound(k, cluster.size() * blockDim.x, vocab)) return;
  const float reached = reached_by<T>(cluster, best, k);
  if (!(reached > minus_infinity())) return;
  const float lowest = lowest_of(reached);
  keep_listed(cluster, slice, static_cast<uint32_t>(room),
              [&](auto see) { slice.each_of([=](float logit) { return logit >= lowest; }, see); });
}

// Leaves the tokens of `set` that are in one bin of masses; or all.
template <class T>
__device__ void keep_mass_bin(RowCluster& cluster, RowSlice<T>& slice, const KeptSet& set,
                              const TokenWeight& weight, uint32_t bin, int room) {
  keep_listed(cluster, slice, static_cast<uint32_t>(room), [&](auto see) {
    slice.each_of([&](float logit) { return mass_bin(weight, logit) == bin; },
                  [&](float logit, uint32_t token) {
                    if (set.contains(logit, token)) see(logit, token);
                  });
  });
}

}  // namespace lmdecode::sampling::cuda_kernels
