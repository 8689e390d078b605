// sliding_window_decode on a GPU: parts of the cache, then the rows that they make.
#pragma once

#include "attention/decode_launch.h"
#include "attention/matrix_tile.cuh"
#include "attention/plain_attention.cuh"

namespace lmdecode::attention::cuda_kernels {

// 16 rows, with 16 keys of each step for each warp, on tensor cores, for head sizes up to kSize.
template <int kSize>
struct DecodeShape {
  static constexpr int kRows = 16;
  static constexpr int kWarps = cuda_tuning::decode_warps(kSize);
  static constexpr int kKeys = 16 * kWarps;
  static constexpr int kStages = cuda_tuning::kDecodeStages;
  static constexpr int kThreads = kWarps * cuda::kWarpSize;
};

template <class T, int kSize>
struct DecodeStorage {
  using Shape = DecodeShape<kSize>;
  struct Cache {
    alignas(128) T keys[Shape::kStages][Shape::kKeys * kSize];
    alignas(128) T values[Shape::kStages][Shape::kKeys * kSize];
  };
  struct Sums {  // of each warp
    float out[Shape::kWarps][Shape::kRows][kSize];
    float row_max[Shape::kWarps][Shape::kRows];
    float row_sum[Shape::kWarps][Shape::kRows];
  };
  union {
    Cache cache;
    Sums sums;
  };
  alignas(128) T queries[Shape::kRows * kSize];
  KeyRange row_keys[Shape::kRows];
  // In shared memory, to leave registers to scores and sums.
  AttentionRows rows;
  RowsKeys seen;
};

// The rows of the warps, each over its keys, to one: in the order of the warps.
template <class T, int kSize, class Output>
__device__ void add_warps(const WarpRows<T, kSize, 1, 16>& warp, int count, int value_size,
                          DecodeStorage<T, kSize>& storage, const Output& output) {
  using Shape = DecodeShape<kSize>;
  auto& sums = storage.sums;
  const int lane = cuda::lane_id(), mine = cuda::warp_id();
  __syncthreads();  // the cache has been read
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = h * 8 + lane / 4;
    if (lane % 4 == 0) {
      sums.row_max[mine][row] = warp.row_max[0][h];
      sums.row_sum[mine][row] = warp.row_sum[0][h];
    }
#pragma unroll
    for (int n = 0; n < kSize / 8; ++n) {
      const int column = n * 8 + lane % 4 * 2;
      sums.out[mine][row][column] = warp.out[0][n][h * 2];
      sums.out[mine][row][column + 1] = warp.out[0][n][h * 2 + 1];
    }
  }
#if !defined(LMD_PLANT_MISSING_BARRIER)
  __syncthreads();
#endif
  for (int row = mine; row < count; row += Shape::kWarps) {
    float top = minus_infinity();
    for (int w = 0; w < Shape::kWarps; ++w) top = fmaxf(top, sums.row_max[w][row]);
    float share[Shape::kWarps], sum = 0.0f;
    for (int w = 0; w < Shape::kWarps; ++w) {
      const float max = sums.row_max[w][row];
      // -inf: it has no keys, or NaN alone, which its sum tells.
      share[w] = max > minus_infinity() ? cuda::exp2_approximate(max - top) : 1.0f;
      sum = __fmaf_rn(sums.row_sum[w][row], share[w], sum);
    }
    const auto to = output.row(row, top, sum, lane == 0);
    for (int column = lane; column < value_size; column += cuda::kWarpSize) {
      float out = 0.0f;
      for (int w = 0; w < Shape::kWarps; ++w) {
        out = __fmaf_rn(sums.out[w][row][column], share[w], out);
      }
      to.put(column, out);
    }
  }
}

// Writes the rows of a part. kWhole: it is the only part.
template <class T, bool kWhole>
__device__ auto decoded_rows(const DecodeLaunch& launch, const AttentionRows& rows, int64_t slot,
                             int64_t first_row) {
  if constexpr (kWhole) {
    return FinishedRows<T>{launch.params, rows};
  } else {
    return PartRows{launch.partials, slot, first_row};
  }
}

// Writes rows that see no key of a part.
template <bool kWhole, class Output>
__device__ void put_empty_rows(const Output& output, int count, int value_size) {
  const int warps = static_cast<int>(blockDim.x) / cuda::kWarpSize, lane = cuda::lane_id();
  for (int row = cuda::warp_id(); row < count; row += warps) {
    const auto to = output.row(row, minus_infinity(), 0.0f, lane == 0);
    if constexpr (!kWhole) continue;  // its sum says that it has no out
    for (int column = lane; column < value_size; column += cuda::kWarpSize) to.put(column, 0.0f);
  }
}

template <class T, int kSize, bool kWhole, RowKind kKind>
__global__ void __launch_bounds__(DecodeShape<kSize>::kThreads, cuda_tuning::decode_blocks(kSize))
    sliding_window_decode_kernel(const DecodeLaunch launch) {
  using Shape = DecodeShape<kSize>;
  DecodeStorage<T, kSize>& storage = cuda::shared_storage<DecodeStorage<T, kSize>>();
  const SlidingWindowAttentionParams& p = launch.params;
  constexpr bool kExact = kKind == RowKind::kExact;
  const int head_size = kExact ? kSize : static_cast<int>(p.head_size);
  const int value_size = kExact ? kSize : static_cast<int>(p.value_size);
  using Loader = TileLoader<T, kSize, Shape::kThreads, kKind>;
  const Loader query_loader(p.q, p.q_strides, p.head_size);
  const Loader key_loader(p.k, p.k_strides, p.head_size);
  const Loader value_loader(p.v, p.v_strides, p.value_size);
  const int first_key = cuda::warp_id() * 16;

  const int64_t count = launch.count();
  for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
    const int64_t part = launch.part(index), head = launch.head(index);
    const int64_t sequence = launch.sequence(index), row = launch.first_row(index);
    __syncthreads();  // what was in shared memory before has been read
    if (threadIdx.x == 0) {
      storage.rows =
          AttentionRows::of(p, AttentionSequence::of(p, sequence), head, row, launch.tile_rows);
    }
    __syncthreads();
    const AttentionRows& rows = storage.rows;
    const ScoreRule rule(p, rows);
    const bool has_rule = needs_score_rule(p);
    const float factor = rule.exponent_factor();
    find_row_keys(p, rows, Shape::kRows, storage.row_keys);
    __syncthreads();
    if (cuda::warp_id() == 0) {
      RowsKeys found = keys_of_rows(storage.row_keys, rows.count);
      found.some = decode_part(found.some, part, launch.split_keys);
      if (cuda::lane_id() == 0) storage.seen = found;
    }
    __syncthreads();
    const RowsKeys& seen = storage.seen;
    const auto output =
        decoded_rows<T, kWhole>(launch, rows, launch.slot(sequence, head, part), row);
    if (seen.some.begin >= seen.some.end) {
      put_empty_rows<kWhole>(output, rows.count, value_size);
      continue;
    }
    query_loader.template load<Shape::kRows>(
        storage.queries, [&](int r) { return r < rows.count ? query_of<T>(p, rows, r) : nullptr; });
    const auto row_of = [&](const void* tensor, const AttentionStrides& strides, int64_t first) {
      return [&, tensor, first](int r) -> const T* {
        const int64_t key = first + r;
        if (key < seen.some.begin || key >= seen.some.end) return nullptr;
        return CacheRows<T>(p, tensor, strides, rows).row(key);
      };
    };
    const auto load_step = [&](int64_t first, int stage) {
      if (first < seen.some.end) {
        key_loader.template load<Shape::kKeys>(storage.cache.keys[stage],
                                               row_of(p.k, p.k_strides, first));
        value_loader.template load<Shape::kKeys>(storage.cache.values[stage],
                                                 row_of(p.v, p.v_strides, first));
      }
      cuda::copy_async_commit();
    };

    WarpRows<T, kSize, 1, 16> warp;
    int64_t first = seen.some.begin / Shape::kKeys * Shape::kKeys;
    for (int stage = 0; stage < Shape::kStages - 1; ++stage) {
      load_step(first + stage * Shape::kKeys, stage);
    }
    for (int stage = 0; first < seen.some.end; first += Shape::kKeys) {
      const int last = (stage + Shape::kStages - 1) % Shape::kStages;
      load_step(first + (Shape::kStages - 1) * Shape::kKeys, last);
      cuda::copy_async_wait<Shape::kStages - 1>();
      __syncthreads();  // the step is there
      float scores[1][2][4];
      warp.multiply_keys(storage.queries, 0, storage.cache.keys[stage], first_key, head_size,
                         scores);
      const int64_t from = first + first_key;
      if (has_rule || !seen.all_see(from, from + 16)) {
        warp.apply_rule(rule, has_rule, storage.row_keys, seen.some, 0, from, scores);
      }
      warp.weigh(factor, scores);
      warp.add_values(scores, storage.cache.values[stage], first_key, value_size);
      __syncthreads();  // the step has been read
      stage = (stage + 1) % Shape::kStages;
    }
    cuda::copy_async_wait<0>();
    warp.finish_sums();
    add_warps(warp, rows.count, value_size, storage, output);
  }
}

template <class T, int kValueSize, bool kWhole>
__global__ void __launch_bounds__(kPlainThreads) plain_decode_kernel(const DecodeLaunch launch) {
  const SlidingWindowAttentionParams& p = launch.params;
  const int64_t count = launch.count();
  for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
    const int64_t part = launch.part(index), head = launch.head(index);
    const int64_t sequence = launch.sequence(index), row = launch.first_row(index);
    const AttentionRows rows =
        AttentionRows::of(p, AttentionSequence::of(p, sequence), head, row, launch.tile_rows);
    attend_plainly<T, cuda_tuning::kPlainDecodeRows, kValueSize>(
        p, rows, [&](KeyRange some) { return decode_part(some, part, launch.split_keys); },
        decoded_rows<T, kWhole>(launch, rows, launch.slot(sequence, head, part), row));
  }
}

// Weights of some parts of a row.
struct CombineStorage {
  float share[cuda_tuning::kCombineParts];
  float sum[cuda_tuning::kCombineParts];
};

// A block a row, a thread a column: adds the parts in their order. Loads do not wait for each
// other.
template <class T>
__global__ void __launch_bounds__(cuda_tuning::kCombineThreads)
    combine_parts_kernel(const DecodeLaunch launch) {
  constexpr int kHeld = cuda_tuning::kCombineParts, kLoads = cuda_tuning::kCombineLoads;
  CombineStorage& storage = cuda::shared_storage<CombineStorage>();
  const SlidingWindowAttentionParams& p = launch.params;
  const DecodeParts& partials = launch.partials;
  const int threads = static_cast<int>(blockDim.x), mine = static_cast<int>(threadIdx.x);
  const int64_t count = p.sequences * p.kv_heads * partials.rows;
  for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
    const int64_t row = index % partials.rows, head = index / partials.rows % p.kv_heads;
    const int64_t sequence = index / partials.rows / p.kv_heads;
    const AttentionRows rows =
        AttentionRows::of(p, AttentionSequence::of(p, sequence), head, row, 1);
    const int64_t place = launch.slot(sequence, head, 0) * partials.rows + row;
    const float* const row_max = partials.row_max + place;  // of parts, partials.rows apart
    const float* const row_sum = partials.row_sum + place;
    float top = minus_infinity();
#pragma unroll 4
    for (int64_t part = cuda::lane_id(); part < launch.parts; part += cuda::kWarpSize) {
      top = fmaxf(top, row_max[part * partials.rows]);
    }
    for (int offset = cuda::kWarpSize / 2; offset > 0; offset /= 2) {
      top = fmaxf(top, __shfl_xor_sync(cuda::kFullMask, top, offset));
    }
    for (int64_t base = 0; base < p.value_size; base += threads) {
      const int64_t column = base + mine;
      const float* const from = partials.out + place * partials.out_stride + column;
      const bool has_column = column < p.value_size;
      float sum = 0.0f, out = 0.0f;
      for (int64_t first = 0; first < launch.parts; first += kHeld) {
        const int held = static_cast<int>(min_of(int64_t{kHeld}, launch.parts - first));
        __syncthreads();  // what was there has been read
        for (int i = mine; i < held; i += threads) {
          const int64_t at = (first + i) * partials.rows;
          const float max = row_max[at];
          // -inf: the part has no keys, or NaN alone, which its sum tells.
          storage.share[i] = max > minus_infinity() ? exp2f(max - top) : 1.0f;
          storage.sum[i] = row_sum[at];
        }
        __syncthreads();
        for (int i = 0; i < held; i += kLoads) {
          float values[kLoads];
#pragma unroll
          for (int k = 0; k < kLoads; ++k) {
            // A part without keys may have no out.
            const bool is_there = i + k < held && has_column && storage.sum[i + k] != 0.0f;
            const int64_t at = (first + i + k) * partials.rows * partials.out_stride;
            values[k] = is_there ? from[at] : 0.0f;
          }
#pragma unroll
          for (int k = 0; k < kLoads; ++k) {
            if (i + k >= held) break;
            const float part_sum = storage.sum[i + k], share = storage.share[i + k];
            sum = __fmaf_rn(part_sum, share, sum);
            if (part_sum != 0.0f) out = __fmaf_rn(values[k], share, out);
          }
        }
      }
      const auto to = FinishedRows<T>{p, rows}.row(0, top, sum, column == 0);
      to.put(column, out);
    }
  }
}

}  // namespace lmdecode::attention::cuda_kernels
