// sliding_window_attention on a GPU.
#pragma once

#include "attention/attention_cuda_tuning.h"
#include "attention/matrix_tile.cuh"
#include "attention/plain_attention.cuh"

namespace lmdecode::attention::cuda_kernels {

// Tiles of rows on tensor cores, for head sizes up to kSize.
template <int kSize>
struct AttentionShape {
  static constexpr int kRowTiles = cuda_tuning::row_tiles(kSize);
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kRows = cuda_tuning::kWarps * kWarpRows;
  static constexpr int kKeys = cuda_tuning::kKeys;
  static constexpr int kThreads = cuda_tuning::kWarps * cuda::kWarpSize;
};

template <class T, int kSize>
struct AttentionStorage {
  using Shape = AttentionShape<kSize>;
  alignas(128) T queries[Shape::kRows * kSize];
  alignas(128) T keys[Shape::kKeys * kSize];
  alignas(128) T values[Shape::kKeys * kSize];
  KeyRange row_keys[Shape::kRows];
  // In shared memory, to leave registers to scores and sums.
  AttentionRows rows;
  RowsKeys seen;
};

// The values of a step are loaded while its scores are computed, the keys of the next while values
// are multiplied. kHasRule: needs_score_rule(); its code costs registers.
template <class T, int kSize, bool kHasRule, RowKind kKind>
__global__ void __launch_bounds__(AttentionShape<kSize>::kThreads)
    sliding_window_attention_kernel(const SlidingWindowAttentionParams p) {
  using Shape = AttentionShape<kSize>;
  AttentionStorage<T, kSize>& storage = cuda::shared_storage<AttentionStorage<T, kSize>>();
  const AttentionTiles tiles = AttentionTiles::of(p, Shape::kRows);
  constexpr bool kExact = kKind == RowKind::kExact;
  const int head_size = kExact ? kSize : static_cast<int>(p.head_size);
  const int value_size = kExact ? kSize : static_cast<int>(p.value_size);
  using Loader = TileLoader<T, kSize, Shape::kThreads, kKind>;
  const Loader query_loader(p.q, p.q_strides, p.head_size);
  const Loader key_loader(p.k, p.k_strides, p.head_size);
  const Loader value_loader(p.v, p.v_strides, p.value_size);
  const int first_row = cuda::warp_id() * Shape::kWarpRows;

  for (int64_t index = blockIdx.x; index < tiles.count; index += gridDim.x) {
    __syncthreads();  // the tile before has been read
    if (threadIdx.x == 0) storage.rows = tiles.tile(p, index);
    __syncthreads();
    const AttentionRows& rows = storage.rows;
    if (rows.count == 0) continue;
    const ScoreRule rule(p, rows);
    const float factor = rule.exponent_factor();
    find_row_keys(p, rows, Shape::kRows, storage.row_keys);
    query_loader.template load<Shape::kRows>(storage.queries, [&](int row) {
      return row < rows.count ? query_of<T>(p, rows, row) : nullptr;
    });
    __syncthreads();
    if (cuda::warp_id() == 0) {
      const RowsKeys found = keys_of_rows(storage.row_keys, rows.count);
      if (cuda::lane_id() == 0) storage.seen = found;
    }
    __syncthreads();
    const RowsKeys& seen = storage.seen;
    // Keys that no row sees are not read, but are zeros where a step holds them.
    const auto row_of = [&](const void* tensor, const AttentionStrides& strides, int64_t first) {
      return [&, tensor, first](int row) -> const T* {
        const int64_t key = first + row;
        if (key < seen.some.begin || key >= seen.some.end) return nullptr;
        return CacheRows<T>(p, tensor, strides, rows).row(key);
      };
    };
    const auto load_keys = [&](int64_t first) {
      if (first < seen.some.end) {
        key_loader.template load<Shape::kKeys>(storage.keys, row_of(p.k, p.k_strides, first));
      }
      cuda::copy_async_commit();
    };

    WarpRows<T, kSize, Shape::kRowTiles, Shape::kKeys> warp;
    int64_t first = seen.some.begin / Shape::kKeys * Shape::kKeys;
    load_keys(first);
    for (; first < seen.some.end; first += Shape::kKeys) {
      cuda::copy_async_wait<0>();
      __syncthreads();  // the keys are there, and the values before have been read
      value_loader.template load<Shape::kKeys>(storage.values, row_of(p.v, p.v_strides, first));
      cuda::copy_async_commit();
      float scores[Shape::kRowTiles][Shape::kKeys / 8][4];
      warp.multiply_keys(storage.queries, first_row, storage.keys, 0, head_size, scores);
      if (kHasRule || !seen.all_see(first, first + Shape::kKeys)) {
        warp.apply_rule(rule, kHasRule, storage.row_keys, seen.some, first_row, first, scores);
      }
      warp.weigh(factor, scores);
      cuda::copy_async_wait<0>();
#if !defined(LMD_PLANT_MISSING_BARRIER)
      __syncthreads();  // the values are there, and the keys have been read
#endif
      load_keys(first + Shape::kKeys);
      warp.add_values(scores, storage.values, 0, value_size);
    }
    cuda::copy_async_wait<0>();

    warp.finish_sums();
    const FinishedRows<T> output = {p, rows};
    const int lane = cuda::lane_id();
#pragma unroll
    for (int t = 0; t < Shape::kRowTiles; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first_row + t * 16 + h * 8 + lane / 4;
        if (row >= rows.count) continue;
        const auto to = output.row(row, warp.row_max[t][h], warp.row_sum[t][h], lane % 4 == 0);
#pragma unroll
        for (int n = 0; n < kSize / 8; ++n) {
          to.put_pair(n * 8 + lane % 4 * 2, warp.out[t][n][h * 2], warp.out[t][n][h * 2 + 1]);
        }
      }
    }
  }
}

// The same for every dtype and size, kValueSize at least the value_size.
template <class T, int kValueSize>
__global__ void __launch_bounds__(kPlainThreads)
    plain_attention_kernel(const SlidingWindowAttentionParams p) {
  constexpr int kWarpRows = cuda_tuning::kPlainRows;
  const AttentionTiles tiles = AttentionTiles::of(p, PlainStorage<kWarpRows>::kRows);
  for (int64_t index = blockIdx.x; index < tiles.count; index += gridDim.x) {
    const AttentionRows rows = tiles.tile(p, index);
    if (rows.count == 0) continue;
    attend_plainly<T, kWarpRows, kValueSize>(
        p, rows, [](KeyRange some) { return some; }, FinishedRows<T>{p, rows});
  }
}

}  // namespace lmdecode::attention::cuda_kernels
