// Attention of a decoder's step on a GPU: a block a row and head, or, where rows of a request
// share keys and values, a few rows and a head. What a row gets depends on its own sequence alone.
#pragma once

#include <cmath>

#include "decoder/step_block.cuh"
#include "decoder/step_values.h"

namespace lmdecode::decoder::step_cuda_kernels {

// scores[0 .. count) to weights that are not yet divided; returns what they are to be multiplied
// by. A barrier lies before; the weights are there for all behind it.
__device__ __forceinline__ float softmax_weights(float* scores, int64_t count, float epsilon,
                                                 float* reduced) {
  float top = -INFINITY;
  for (int64_t t = threadIdx.x; t < count; t += blockDim.x) top = Largest()(top, scores[t]);
  top = reduce_block(top, reduced, Largest());
  const float shift = top > -INFINITY ? top : 0.0f;
  float sum = 0.0f;
  for (int64_t t = threadIdx.x; t < count; t += blockDim.x) {
    scores[t] = expf(scores[t] - shift);
    sum += scores[t];
  }
  const float divisor = reduce_block(sum, reduced, Sum()) + epsilon;
  return divisor == 0.0f ? 0.0f : 1.0f / divisor;
}

// Threads stand in parts, each with a thread for an element of the head; a part adds up every
// parts-th position.
struct HeadThreads {
  int64_t width, parts, part, first;

  __device__ explicit HeadThreads(int64_t head_size)
      : width(head_size < blockDim.x ? head_size : blockDim.x),
        parts(blockDim.x / width),
        part(threadIdx.x / width),
        first(threadIdx.x % width) {}
  __device__ bool works() const { return part < parts; }
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    decoder_self_attention_kernel(const StepSelfAttentionParams p) {
  StepStorage& storage = cuda::shared_storage<StepStorage>();
  float* const query = reinterpret_cast<float*>(&storage + 1);
  float* const scores = query + p.shape.padded_head();
  const int64_t head_size = p.shape.head_size, padded = p.shape.padded_head();
  const int64_t heads = p.shape.heads;
  T* const keys = static_cast<T*>(p.keys);
  T* const values = static_cast<T*>(p.values);
  for (int64_t item = blockIdx.x; item < p.rows * heads; item += gridDim.x) {
    const int64_t row = item / heads, head = item % heads, position = p.positions[row];
    T* const out = static_cast<T*>(p.out) + item * head_size;
    if (position < 0 || position >= p.capacity) {
      for (int64_t d = threadIdx.x; d < head_size; d += blockDim.x) out[d] = ValueOf<T>::from(0.0f);
      continue;
    }
    const T* const q = static_cast<const T*>(p.qkv) + (row * 3 * heads + head) * head_size;
    const T* const k = q + heads * head_size;
    const T* const v = k + heads * head_size;
    const int64_t own = (item * p.capacity + position) * padded;
    for (int64_t d = threadIdx.x; d < padded; d += blockDim.x) {
      const bool is_real = d < head_size;
      query[d] = is_real ? to_float(q[d]) * p.shape.scale : 0.0f;
      keys[own + d] = is_real ? k[d] : ValueOf<T>::from(0.0f);
      values[own + d] = is_real ? v[d] : ValueOf<T>::from(0.0f);
    }
    __syncthreads();
    const int32_t* const table = p.table + row * p.capacity;
    // Where the key of a position is: of this step the row's own, which no other row reads.
    const auto at = [&](int64_t t) {
      const int64_t entry = table[t];
      const int64_t from = t == position || entry < 0 || entry >= p.rows ? row : entry;
      return ((from * heads + head) * p.capacity + t) * padded;
    };
    for (int64_t t = cuda::warp_id(); t <= position; t += blockDim.x / cuda::kWarpSize) {
      const T* const key = keys + at(t);
      float sum = 0.0f;
      for (int64_t d = cuda::lane_id(); d < head_size; d += cuda::kWarpSize) {
        sum += query[d] * to_float(key[d]);
      }
      sum = reduce_warp(sum, Sum());
      if (p.bias != nullptr) sum += p.bias[head * p.bias_stride + position - t];
      if (cuda::lane_id() == 0) scores[t] = sum;
    }
    __syncthreads();
    const float factor =
        softmax_weights(scores, position + 1, p.shape.denominator_epsilon, storage.reduced);
    const HeadThreads threads(head_size);
    for (int64_t begin = 0; begin < head_size; begin += threads.width) {
      const int64_t d = begin + threads.first;
      float sum = 0.0f;
      if (threads.works() && d < head_size) {
        for (int64_t t = threads.part; t <= position; t += threads.parts) {
          sum += scores[t] * to_float(values[at(t) + d]);
        }
      }
      storage.partial[threadIdx.x] = sum;
      __syncthreads();
      if (threads.part == 0 && d < head_size) {
        for (int64_t part = 1; part < threads.parts; ++part) {
          sum += storage.partial[part * threads.width + threads.first];
        }
        out[d] = ValueOf<T>::from(sum * factor);
      }
      __syncthreads();
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    decoder_cross_attention_kernel(const StepCrossAttentionParams p) {
  constexpr int kRows = step_cuda_tuning::kCrossRows;
  StepStorage& storage = cuda::shared_storage<StepStorage>();
  const int64_t head_size = p.shape.head_size, padded = p.shape.padded_head();
  const int64_t heads = p.shape.heads, groups = cross_groups(p);
  float* const queries = reinterpret_cast<float*>(&storage + 1);
  float* const scores = queries + kRows * padded;
  for (int64_t item = blockIdx.x; item < p.requests * heads * groups; item += gridDim.x) {
    const int64_t group = item % groups, head = item / groups % heads;
    const int64_t request = item / groups / heads;
    const int64_t first = group * kRows, left = p.request_rows - first;
    const int rows = left < kRows ? static_cast<int>(left) : kRows;
    // Of row r of the group, from the first element of the head.
    const auto place = [&](int r) {
      return ((request * p.request_rows + first + r) * heads + head) * head_size;
    };
    for (int r = 0; r < kRows; ++r) {
      for (int64_t d = threadIdx.x; d < head_size; d += blockDim.x) {
        queries[r * padded + d] =
            r < rows ? to_float(static_cast<const T*>(p.queries)[place(r) + d]) * p.shape.scale
                     : 0.0f;
      }
    }
    __syncthreads();
    const int64_t given = p.lengths[request];
    const int64_t length = given < 0 ? 0 : given < p.source ? given : p.source;
    const int64_t cache = (request * heads + head) * padded * p.source;
    const T* const keys = static_cast<const T*>(p.keys) + cache;
    const T* const values = static_cast<const T*>(p.values) + cache;
    for (int64_t s = threadIdx.x; s < length; s += blockDim.x) {
      float sum[kRows] = {};
      for (int64_t d = 0; d < head_size; ++d) {
        const float key = to_float(keys[d * p.source + s]);
        for (int r = 0; r < kRows; ++r) sum[r] += queries[r * padded + d] * key;
      }
      for (int r = 0; r < kRows; ++r) scores[r * p.source + s] = sum[r];
    }
    __syncthreads();
    float factor[kRows];
    for (int r = 0; r < kRows; ++r) {
      factor[r] = softmax_weights(scores + r * p.source, length, p.shape.denominator_epsilon,
                                  storage.reduced);
    }
    const HeadThreads threads(head_size);
    for (int64_t begin = 0; begin < head_size; begin += threads.width) {
      const int64_t d = begin + threads.first;
      float sum[kRows] = {};
      if (threads.works() && d < head_size) {
        for (int64_t s = threads.part; s < length; s += threads.parts) {
          const float value = to_float(values[s * padded + d]);
          for (int r = 0; r < kRows; ++r) sum[r] += scores[r * p.source + s] * value;
        }
      }
      for (int r = 0; r < kRows; ++r) storage.partial[r * kThreads + threadIdx.x] = sum[r];
      __syncthreads();
      if (threads.part == 0 && d < head_size) {
        for (int r = 0; r < rows; ++r) {
          float all = sum[r];
          for (int64_t part = 1; part < threads.parts; ++part) {
            all += storage.partial[r * kThreads + part * threads.width + threads.first];
          }
          static_cast<T*>(p.out)[place(r) + d] = ValueOf<T>::from(all * factor[r]);
        }
      }
      __syncthreads();
    }
  }
}

// A thread an element of a head and position, of keys and values.
template <class T>
__global__ void __launch_bounds__(kThreads)
    decoder_cross_cache_kernel(const StepCrossCacheParams p) {
  const int64_t head_size = p.shape.head_size, padded = p.shape.padded_head();
  const int64_t heads = p.shape.heads, area = padded * p.source;
  const int64_t count = p.requests * heads * area;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const T* const from = static_cast<const T*>(p.key_value);
  const T zero = ValueOf<T>::from(0.0f);
  // What lies at (request, position, keys or values, head, d), or 0 outside.
  const auto state = [&](int64_t item, int64_t s, int which, int64_t d) {
    const int64_t request = item / heads, head = item % heads;
    if (s >= p.length || d >= head_size) return zero;
    return from[(((request * p.length + s) * 2 + which) * heads + head) * head_size + d];
  };
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += threads) {
    const int64_t item = i / area, place = i % area;
    static_cast<T*>(p.keys)[i] = state(item, place % p.source, 0, place / p.source);
    static_cast<T*>(p.values)[i] = state(item, place / padded, 1, place % padded);
  }
}

}  // namespace lmdecode::decoder::step_cuda_kernels
