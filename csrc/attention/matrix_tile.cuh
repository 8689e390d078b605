// The tiles of attention on tensor cores: 16-bit elements in shared memory, and the rows of a warp
// with their scores, weights and sums in the fragments of mma.m16n8k16.
#pragma once

#include <cstddef>
#include <type_traits>

#include "attention/row_tensors.cuh"
#include "attention/row_total.h"
#include "attention/score_rule.cuh"
#include "attention/sliding_window_attention.h"
#include "common/host_device.h"

// ---- the layout of the rows of q, k and v

namespace lmdecode::attention::cuda_kernels {

// kAny: rows of any size and stride. kExact: rows of kSize contiguous elements, aligned to 16
// bytes, so that the kernel needs no branches and no element-wise loads. Same results.
enum class RowKind { kAny, kExact };

LMD_HOST_DEVICE bool has_aligned_rows(const void* data, const AttentionStrides& s,
                                      size_t element_bytes) {
  const int64_t elements = 16 / static_cast<int64_t>(element_bytes);
  return s.element == 1 && reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
         (s.sequence | s.head | s.token) % elements == 0;
}

// Calls run(std::integral_constant) with the kind of a call's rows of 16-bit elements, for a kernel
// of this size.
template <class Run>
void with_row_kind(const SlidingWindowAttentionParams& p, int size, const Run& run) {
  const auto is_aligned = [](const void* data, const AttentionStrides& strides) {
    return has_aligned_rows(data, strides, 2);
  };
  const bool is_exact = p.head_size == size && p.value_size == size &&
                        is_aligned(p.q, p.q_strides) && is_aligned(p.k, p.k_strides) &&
                        is_aligned(p.v, p.v_strides);
  if (is_exact) {
    run(std::integral_constant<RowKind, RowKind::kExact>());
  } else {
    run(std::integral_constant<RowKind, RowKind::kAny>());
  }
}

// ---- the layout of a tile of 16-bit elements in shared memory

constexpr int kChunk = 8;  // elements of 16 bytes, contiguous

// The offset of an element (column % 8 == 0) in a tile of rows of kSize. The same chunk of eight
// consecutive rows falls into eight different groups of banks.
template <int kSize>
LMD_HOST_DEVICE int swizzled(int row, int column) {
  static_assert(kSize % (8 * kChunk) == 0);
  return row * kSize + (column / kChunk ^ row % 8) * kChunk;
}

__device__ __forceinline__ unsigned round_pair(BFloat16, float first, float second) {
  return cuda::round_to_bf16(first, second);
}
__device__ __forceinline__ unsigned round_pair(Half, float first, float second) {
  return cuda::round_to_f16(first, second);
}
__device__ __forceinline__ void multiply_add(BFloat16, float (&sum)[4], const unsigned (&a)[4],
                                             const unsigned (&b)[2]) {
  cuda::multiply_add_bf16(sum, a, b);
}
__device__ __forceinline__ void multiply_add(Half, float (&sum)[4], const unsigned (&a)[4],
                                             const unsigned (&b)[2]) {
  cuda::multiply_add_f16(sum, a, b);
}

// Rows of `size` elements, row_at(row) or 0 where that is null, to a tile [kRows, kSize], 16 bytes
// at a time. A lane finds a row for its warp. By kThreads threads, which may read the tile after
// they waited for their copies and met at a barrier. base: any aligned address.
template <class T, int kRows, int kSize, int kThreads, class RowAt>
__device__ __forceinline__ void copy_rows(T* tile, const RowAt& row_at, const void* base,
                                          int size) {
  constexpr int kChunks = kSize / kChunk, kPassRows = kThreads / kChunks;
  constexpr int kLaneRows = cuda::kWarpSize / kChunks, kPasses = kRows / kPassRows;
  static_assert(kPasses * kPassRows == kRows && kPasses * kLaneRows <= cuda::kWarpSize);
  const int lane = cuda::lane_id(), first = cuda::warp_id() * kLaneRows;
  const T* found = nullptr;
  if (lane < kPasses * kLaneRows) {
    found = row_at(lane / kLaneRows * kPassRows + first + lane % kLaneRows);
  }
  // Bit pass * kLaneRows: whether the row of that copy of this lane exists.
  const unsigned is_there = __ballot_sync(cuda::kFullMask, found != nullptr) >> (lane / kChunks);
  const auto place = reinterpret_cast<unsigned long long>(
      found == nullptr ? base : static_cast<const void*>(found));
  const int column = lane % kChunks * kChunk;
  const unsigned bytes = static_cast<unsigned>(max(min(size - column, kChunk), 0) * sizeof(T));
  const unsigned long long offset = bytes == 0 ? 0 : column * sizeof(T);
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const unsigned long long from =
        __shfl_sync(cuda::kFullMask, place, pass * kLaneRows + lane / kChunks) + offset;
    T* const to = tile + swizzled<kSize>(pass * kPassRows + first + lane / kChunks, column);
    cuda::copy_async_16(to, reinterpret_cast<const void*>(from),
                        is_there >> (pass * kLaneRows) & 1 ? bytes : 0);
  }
}

// The same of elements `stride` apart, one by one.
template <class T, int kRows, int kSize, int kThreads, class RowAt>
__device__ __forceinline__ void gather_rows(T* tile, const RowAt& row_at, int64_t stride,
                                            int size) {
  constexpr int kChunks = kSize / kChunk;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, column = i % kChunks * kChunk;
    const T* const from = row_at(row);
    const int count = from == nullptr ? 0 : max(min(size - column, kChunk), 0);
    unsigned pairs[4] = {};
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      if (e < count) pairs[e / 2] |= unsigned{from[(column + e) * stride].bits} << (e % 2 * 16);
    }
    *reinterpret_cast<uint4*>(tile + swizzled<kSize>(row, column)) =
        make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

// Loads tiles of rows of one tensor.
template <class T, int kSize, int kThreads, RowKind kKind>
class TileLoader {
 public:
  __device__ TileLoader(const void* data, const AttentionStrides& strides, int64_t size)
      : data_(data),
        stride_(strides.element),
        size_(static_cast<int>(size)),
        is_aligned_(has_aligned_rows(data, strides, sizeof(T))) {}

  template <int kRows, class RowAt>
  __device__ __forceinline__ void load(T* tile, const RowAt& row_at) const {
    if constexpr (kKind == RowKind::kExact) {
      copy_rows<T, kRows, kSize, kThreads>(tile, row_at, data_, kSize);
    } else if (is_aligned_) {
      copy_rows<T, kRows, kSize, kThreads>(tile, row_at, data_, size_);
    } else {
      gather_rows<T, kRows, kSize, kThreads>(tile, row_at, stride_, size_);
    }
  }

 private:
  const void* data_;
  int64_t stride_;
  int size_;
  bool is_aligned_;
};

// 16 kRowTiles rows of a warp, for kKeys keys at a time and values of up to kSize. A thread has
// rows lane / 4 and lane / 4 + 8 of each 16, and two columns of each 8.
template <class T, int kSize, int kRowTiles, int kKeys>
class WarpRows {
 public:
  using Scores = float[kRowTiles][kKeys / 8][4];

  __device__ WarpRows() {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      for (int h = 0; h < 2; ++h) {
        row_max[t][h] = minus_infinity();
        row_sum[t][h] = 0.0f;
      }
#pragma unroll
      for (int n = 0; n < kSize / 8; ++n) {
        for (int i = 0; i < 4; ++i) out[t][n][i] = 0.0f;
      }
    }
  }

  // Multiplies the rows from first_row on of a tile [.., kSize] with the keys from first_key on.
  __device__ void multiply_keys(const T* queries, int first_row, const T* keys, int first_key,
                                int head_size, Scores& scores) const {
    const int lane = cuda::lane_id();
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        for (int i = 0; i < 4; ++i) scores[t][n][i] = 0.0f;
      }
    }
#pragma unroll
    for (int k = 0; k < kSize / 16; ++k) {
      if (k * 16 >= head_size) break;
      unsigned a[kRowTiles][4];
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        const int row = first_row + t * 16 + lane % 16;
        cuda::load_matrices(a[t], queries + swizzled<kSize>(row, k * 16 + lane / 16 * 8));
      }
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        const int key = first_key + n * 16 + lane / 16 * 8 + lane % 8;
        unsigned b[4];
        cuda::load_matrices(b, keys + swizzled<kSize>(key, k * 16 + lane / 8 % 2 * 8));
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) {
          multiply_add(T{}, scores[t][2 * n], a[t], {b[0], b[1]});
          multiply_add(T{}, scores[t][2 * n + 1], a[t], {b[2], b[3]});
        }
      }
    }
  }

  // Turns products into scores, hidden ones into -inf. Column 0 of the scores is key `first`.
  __device__ void apply_rule(const ScoreRule& rule, bool has_rule, const KeyRange* row_keys,
                             KeyRange seen, int first_row, int64_t first, Scores& scores) const {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first_row + t * 16 + h * 8 + cuda::lane_id() / 4;
        const KeyRange range = {max_of(row_keys[row].begin, seen.begin),
                                min_of(row_keys[row].end, seen.end)};
        const KeyRange shown = part_of_range(range, first, first + kKeys);
        const int begin = static_cast<int>(shown.begin), end = static_cast<int>(shown.end);
        const ScoreRule::Row of_row = has_rule && begin < end ? rule.row(row) : ScoreRule::Row{};
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int key = n * 8 + cuda::lane_id() % 4 * 2 + i;
            float& score = scores[t][n][h * 2 + i];
            if (key < begin || key >= end) {
              score = minus_infinity();
            } else if (has_rule) {
              score = rule.score(score, of_row, first + key);
            }
          }
        }
      }
    }
  }

  // Turns scores into weights, and rescales the sums so far to the new maxima.
  __device__ void weigh(float factor, Scores& scores) {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = minus_infinity();
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
          top = fmaxf(top, fmaxf(scores[t][n][h * 2], scores[t][n][h * 2 + 1]));
        }
        for (int offset = 1; offset <= 2; offset *= 2) {
          top = fmaxf(top, __shfl_xor_sync(cuda::kFullMask, top, offset));
        }
        const float old_max = row_max[t][h], new_max = fmaxf(old_max, top * factor);
        const float share = new_max > old_max ? cuda::exp2_approximate(old_max - new_max) : 1.0f;
        // No key seen so far: shift by 0, so that -inf and NaN propagate.
        float shift = new_max > minus_infinity() ? 0.0f - new_max : 0.0f, from_score = factor;
        if (is_large(new_max)) {
          for_each_of_row(scores[t], h, [&](float& score) {
            score = exponent_below_large(score, factor, new_max);
          });
          shift = 0.0f;
          from_score = 1.0f;
        }
        float sum = 0.0f;
        for_each_of_row(scores[t], h, [&](float& score) {
          score = cuda::exp2_approximate(__fmaf_rn(score, from_score, shift));
          sum += score;
        });
        row_max[t][h] = new_max;
        row_sum[t][h] = row_sum[t][h] * share + sum;
#pragma unroll
        for (int n = 0; n < kSize / 8; ++n) {
          out[t][n][h * 2] *= share;
          out[t][n][h * 2 + 1] *= share;
        }
      }
    }
  }

  // Weights, rounded to T, times the values from first_key on in their tile [.., kSize].
  __device__ void add_values(const Scores& weights, const T* values, int first_key,
                             int value_size) {
    const int lane = cuda::lane_id();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      unsigned a[kRowTiles][4];
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&pair)[4] = weights[t][2 * k + i / 2];
          a[t][i] = round_pair(T{}, pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
        }
      }
      const int key = first_key + k * 16 + lane % 16;
#pragma unroll
      for (int n = 0; n < kSize / 16; ++n) {
        if (n * 16 >= value_size) break;
        unsigned b[4];
        cuda::load_transposed_matrices(b, values + swizzled<kSize>(key, n * 16 + lane / 16 * 8));
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) {
          multiply_add(T{}, out[t][2 * n], a[t], {b[0], b[1]});
          multiply_add(T{}, out[t][2 * n + 1], a[t], {b[2], b[3]});
        }
      }
    }
  }

  // Adds the sums of the four threads of a row; all four get the result.
  __device__ void finish_sums() {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        for (int offset = 1; offset <= 2; offset *= 2) {
          row_sum[t][h] += __shfl_xor_sync(cuda::kFullMask, row_sum[t][h], offset);
        }
      }
    }
  }

  // Calls apply(score) for those of one of a thread's two rows of a tile.
  template <class Apply>
  static __device__ __forceinline__ void for_each_of_row(float (&scores)[kKeys / 8][4], int row,
                                                         const Apply& apply) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      apply(scores[n][row * 2]);
      apply(scores[n][row * 2 + 1]);
    }
  }

  float out[kRowTiles][kSize / 8][4];
  float row_max[kRowTiles][2];  // exponents of two
  float row_sum[kRowTiles][2];
};

}  // namespace lmdecode::attention::cuda_kernels
