// Attention of some rows to some keys without tensor cores: float32, and head sizes above 256.
//
// A warp has kRows rows, a lane a key of each step for the scores, and a column of each 32 for the
// values. Sums go over 64 elements, or over a step's keys, from zero.
#pragma once

#include "attention/row_tensors.cuh"
#include "attention/row_total.h"
#include "attention/score_rule.cuh"

namespace lmdecode::attention::cuda_kernels {

constexpr int kPlainKeys = cuda::kWarpSize;      // of a step
constexpr int kPlainColumns = 64;                // in shared memory at once
constexpr int kPlainStride = kPlainColumns + 4;  // four lanes apart in the banks

template <int kWarpRows>
struct PlainStorage {
  static constexpr int kRows = cuda_tuning::kPlainWarps * kWarpRows;
  alignas(16) float queries[kRows][kPlainStride];
  alignas(16) float keys[kPlainKeys][kPlainStride];  // or values
  float weights[kRows][kPlainKeys];
  KeyRange row_keys[kRows];
};

constexpr int kPlainThreads = cuda_tuning::kPlainWarps * cuda::kWarpSize;

// Four elements side by side, aligned to their size.
__device__ __forceinline__ float4 load_quad(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}
template <class T>
__device__ __forceinline__ float4 load_quad(const T* from) {
  const uint2 bits = *reinterpret_cast<const uint2*>(from);
  const auto element = [](unsigned half) { return to_float(T{static_cast<uint16_t>(half)}); };
  return make_float4(element(bits.x), element(bits.x >> 16), element(bits.y),
                     element(bits.y >> 16));
}

// `rows` elements [column, column + 64) of what row_at(row) points to, 0 past `size` and for null:
// four a thread.
template <class T, class RowAt>
__device__ void load_floats(float (*to)[kPlainStride], int rows, const RowAt& row_at,
                            int64_t stride, int64_t column, int64_t size) {
  constexpr int kQuads = kPlainColumns / 4;
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x); i < rows * kQuads; i += kPlainThreads) {
    const int row = i / kQuads, place = i % kQuads * 4;
    const T* const from = row_at(row);
    const int64_t at = column + place;
    float4 quad = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (from != nullptr && stride == 1 && at + 4 <= size &&
        reinterpret_cast<uintptr_t>(from + at) % (4 * sizeof(T)) == 0) {
      quad = load_quad(from + at);
    } else if (from != nullptr) {
      if (at < size) quad.x = to_float(from[at * stride]);
      if (at + 1 < size) quad.y = to_float(from[(at + 1) * stride]);
      if (at + 2 < size) quad.z = to_float(from[(at + 2) * stride]);
      if (at + 3 < size) quad.w = to_float(from[(at + 3) * stride]);
    }
    *reinterpret_cast<float4*>(&to[row][place]) = quad;
  }
}

// kValueSize: a multiple of 64, at least the value_size. select(row_keys): which of the keys that
// some rows see are taken. By all threads of a block.
template <class T, int kWarpRows, int kValueSize, class Select, class Output>
__device__ void attend_plainly(const SlidingWindowAttentionParams& p, const AttentionRows& rows,
                               const Select& select, const Output& output) {
  using Storage = PlainStorage<kWarpRows>;
  constexpr int kChunks = kValueSize / kPlainColumns;
  Storage& storage = cuda::shared_storage<Storage>();
  const ScoreRule rule(p, rows);
  const bool has_rule = needs_score_rule(p);
  const float factor = rule.exponent_factor();
  const int lane = cuda::lane_id(), first_row = cuda::warp_id() * kWarpRows;
  const CacheRows<T> keys(p, p.k, p.k_strides, rows), values(p, p.v, p.v_strides, rows);

  __syncthreads();  // what was in shared memory before has been read
  find_row_keys(p, rows, Storage::kRows, storage.row_keys);
  __syncthreads();
  const KeyRange seen = select(keys_of_rows(storage.row_keys, rows.count).some);

  float out[kWarpRows][kChunks][2] = {}, row_max[kWarpRows], row_sum[kWarpRows] = {};
  for (int r = 0; r < kWarpRows; ++r) row_max[r] = minus_infinity();

  for (int64_t first = seen.begin / kPlainKeys * kPlainKeys; first < seen.end;
       first += kPlainKeys) {
    const auto cache_row = [&](const CacheRows<T>& cache) {
      return [=](int row) -> const T* {
        const int64_t key = first + row;
        return key >= seen.begin && key < seen.end ? cache.row(key) : nullptr;
      };
    };
    float scores[kWarpRows] = {};
    for (int64_t column = 0; column < p.head_size; column += kPlainColumns) {
      __syncthreads();
      load_floats<T>(
          storage.queries, Storage::kRows,
          [&](int row) { return row < rows.count ? query_of<T>(p, rows, row) : nullptr; },
          p.q_strides.element, column, p.head_size);
      load_floats<T>(storage.keys, kPlainKeys, cache_row(keys), p.k_strides.element, column,
                     p.head_size);
      __syncthreads();
      float part[kWarpRows] = {};
#pragma unroll 4
      for (int i = 0; i < kPlainColumns; i += 4) {
        const float4 key = *reinterpret_cast<const float4*>(&storage.keys[lane][i]);
#pragma unroll
        for (int r = 0; r < kWarpRows; ++r) {
          const float4 query = *reinterpret_cast<const float4*>(&storage.queries[first_row + r][i]);
          part[r] = __fmaf_rn(query.x, key.x, part[r]);
          part[r] = __fmaf_rn(query.y, key.y, part[r]);
          part[r] = __fmaf_rn(query.z, key.z, part[r]);
          part[r] = __fmaf_rn(query.w, key.w, part[r]);
        }
      }
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) scores[r] += part[r];
    }

    float share[kWarpRows];
    const int64_t key = first + lane;
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const int row = first_row + r;
      const KeyRange range = storage.row_keys[row];
      float score = scores[r];
      if (key < max_of(range.begin, seen.begin) || key >= min_of(range.end, seen.end)) {
        score = minus_infinity();
      } else if (has_rule) {
        score = rule.score(score, rule.row(row), key);
      }
      float top = score;
      for (int offset = cuda::kWarpSize / 2; offset > 0; offset /= 2) {
        top = fmaxf(top, __shfl_xor_sync(cuda::kFullMask, top, offset));
      }
      const float new_max = fmaxf(row_max[r], top * factor);
      share[r] = new_max > row_max[r] ? exp2f(row_max[r] - new_max) : 1.0f;
      row_max[r] = new_max;
      // No key seen so far: shift by 0, so that -inf and NaN propagate.
      const float shift = new_max > minus_infinity() ? 0.0f - new_max : 0.0f;
      const float weight = exp2f(is_large(new_max) ? exponent_below_large(score, factor, new_max)
                                                   : __fmaf_rn(score, factor, shift));
      row_sum[r] = row_sum[r] * share[r] + weight;
      storage.weights[row][lane] = weight;
    }

#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (chunk * kPlainColumns >= p.value_size) break;
      __syncthreads();
      load_floats<T>(storage.keys, kPlainKeys, cache_row(values), p.v_strides.element,
                     chunk * kPlainColumns, p.value_size);
      __syncthreads();
      float part[kWarpRows][2] = {};
#pragma unroll 4
      for (int i = 0; i < kPlainKeys; ++i) {
        const float value[2] = {storage.keys[i][lane], storage.keys[i][lane + cuda::kWarpSize]};
#pragma unroll
        for (int r = 0; r < kWarpRows; ++r) {
          const float weight = storage.weights[first_row + r][i];
          part[r][0] = __fmaf_rn(weight, value[0], part[r][0]);
          part[r][1] = __fmaf_rn(weight, value[1], part[r][1]);
        }
      }
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
        out[r][chunk][0] = out[r][chunk][0] * share[r] + part[r][0];
        out[r][chunk][1] = out[r][chunk][1] * share[r] + part[r][1];
      }
    }
  }

#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
    for (int offset = cuda::kWarpSize / 2; offset > 0; offset /= 2) {
      row_sum[r] += __shfl_xor_sync(cuda::kFullMask, row_sum[r], offset);
    }
    if (first_row + r >= rows.count) continue;
    const auto to = output.row(first_row + r, row_max[r], row_sum[r], lane == 0);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      to.put(chunk * kPlainColumns + lane, out[r][chunk][0]);
      to.put(chunk * kPlainColumns + lane + cuda::kWarpSize, out[r][chunk][1]);
    }
  }
}

}  // namespace lmdecode::attention::cuda_kernels
