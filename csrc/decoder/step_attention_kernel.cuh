// Attention of a decoder's step on a GPU: a cluster a row and head, or, where rows of a request
// share keys and values, a few rows and a head. Its blocks share the positions. A row's result
// depends on its own sequence and the size of the cache only.
#pragma once

#include <cmath>

#include "common/element_vector.cuh"
#include "decoder/step_block.cuh"

namespace lmdecode::decoder::step_cuda_kernels {

// The blocks of a cluster, which share the positions of an item. The cluster takes `item` first,
// and `items` are worked on at a time.
struct PositionBlocks {
  int size = static_cast<int>(cuda::cluster_size());
  int rank = size > 1 ? static_cast<int>(cuda::cluster_rank()) : 0;
  int64_t item = blockIdx.x / size;
  int64_t items = gridDim.x / size;
};

// A block's share of `count` positions. `parts`: the blocks that have any, 1 at least.
struct PositionPart {
  int begin, size, parts;
  __device__ PositionPart(int count, const PositionBlocks& blocks) {
    const int most = static_cast<int>(part_size(count, blocks.size));
    begin = blocks.rank * most < count ? blocks.rank * most : count;
    size = count - begin < most ? count - begin : most;
    parts = most < count ? (count + most - 1) / most : 1;
  }
};

// Subtracted from scores before exp().
__device__ __forceinline__ float shift_of(float top) { return top > -INFINITY ? top : 0.0f; }
// The factor that divides weights with this sum.
__device__ __forceinline__ float factor_of(float sum, float epsilon) {
  const float divisor = sum + epsilon;
  return divisor == 0.0f ? 0.0f : 1.0f / divisor;
}

// scores[0], scores[stride], ... of `count` positions to weights that are not yet divided. Returns
// their sum; *largest: the largest score. `threads` threads call it, this one being number `first`
// of them; reduce(value, operation) is over all of them, and they meet in it. They have met before.
template <class Reduce>
__device__ __forceinline__ float softmax_weights(float* scores, int stride, int count, int first,
                                                 int threads, Reduce reduce, float* largest) {
  float top = -INFINITY;
  for (int t = first; t < count; t += threads) top = Largest()(top, scores[t * stride]);
  *largest = top = reduce(top, Largest());
  const float shift = shift_of(top);
  float sum = 0.0f;
  for (int t = first; t < count; t += threads) {
    const float weight = expf(scores[t * stride] - shift);
    scores[t * stride] = weight;
    sum += weight;
  }
  return reduce(sum, Sum());
}

// Lanes stand in groups of kPositionLanes, which read a position together: lane i vectors i, i +
// kPositionLanes, ... of it.
struct PositionThreads {
  static constexpr int kLanes = step_cuda_tuning::kPositionLanes;
  static constexpr int kGroupsOfWarp = cuda::kWarpSize / kLanes;
  int lane = cuda::lane_id() % kLanes;
  int group = static_cast<int>(threadIdx.x) / kLanes;
  int groups = static_cast<int>(blockDim.x) / kLanes;
  int group_of_warp = cuda::lane_id() / kLanes;
};

// Sums over the lanes of a group, or over the groups of a warp.
__device__ __forceinline__ float sum_of_group(float value) {
#pragma unroll
  for (int lanes = PositionThreads::kLanes / 2; lanes > 0; lanes /= 2) {
    value += __shfl_xor_sync(cuda::kFullMask, value, lanes);
  }
  return value;
}
__device__ __forceinline__ float sum_of_groups(float value) {
#pragma unroll
  for (int lanes = PositionThreads::kLanes; lanes < cuda::kWarpSize; lanes *= 2) {
    value += __shfl_xor_sync(cuda::kFullMask, value, lanes);
  }
  return value;
}

// put(r, d, the sum over positions t < count of weights[t * kRows + r] value_at(t)[d]), of rows r <
// rows. Begins and ends with a barrier.
template <int kRows, class T, class ValueAt, class Put>
__device__ __forceinline__ void add_up_values(StepStorage& storage, const float* weights, int count,
                                              int padded, int head_size, int rows, ValueAt value_at,
                                              Put put) {
  using Vector = ElementVector<T>;
  constexpr int kElements = Vector::kSize;
  constexpr int kWidth = PositionThreads::kLanes * kElements;  // elements of a round
  const PositionThreads threads;
  for (int begin = 0; begin < padded; begin += kWidth) {
    const int d = begin + threads.lane * kElements;
    float sum[kElements][kRows] = {};
    if (d < padded) {
#pragma unroll 4
      for (int t = threads.group; t < count; t += threads.groups) {
        const Vector value = Vector::load(value_at(t) + d);
        float weight[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) weight[r] = weights[t * kRows + r];
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            sum[e][r] = __fmaf_rn(weight[r], value[e], sum[e][r]);
          }
        }
      }
    }
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        sum[e][r] = sum_of_groups(sum[e][r]);
        if (threads.group_of_warp == 0) {
          storage.partial[cuda::warp_id()][threads.lane * kElements + e][r] = sum[e][r];
        }
      }
    }
    __syncthreads();
    const int warps = static_cast<int>(blockDim.x) / cuda::kWarpSize;
    for (int i = threadIdx.x; i < kWidth * kRows; i += blockDim.x) {
      const int r = i / kWidth, e = i % kWidth;
      if (r >= rows || begin + e >= head_size) continue;
      float all = 0.0f;
      for (int warp = 0; warp < warps; ++warp) all += storage.partial[warp][e][r];
      put(r, begin + e, all);
    }
    __syncthreads();
  }
}

// put(r, d, the sum of all weights' values, divided) of what `parts` blocks have in their storages
// and sums[d * kRows + r]. All threads of the cluster call it.
template <int kRows, class Put>
__device__ __forceinline__ void put_parts_together(StepStorage& storage, float* sums,
                                                   const PositionBlocks& blocks, int parts,
                                                   int head_size, int rows, float epsilon,
                                                   Put put) {
  using step_cuda_tuning::kMostParts;
  const auto add_up = [&](int r, int d) {
    float top[kMostParts], weight[kMostParts], value[kMostParts];
#pragma unroll
    for (int part = 0; part < kMostParts; ++part) {  // loads that do not wait for each other
      const auto of_part = [&](float* pointer) {
        return *cuda::map_shared_rank(pointer, static_cast<unsigned>(part));
      };
      const bool is_there = part < parts;
      top[part] = is_there ? of_part(storage.top + r) : -INFINITY;
      weight[part] = is_there ? of_part(storage.sum + r) : 0.0f;
      value[part] = is_there ? of_part(sums + d * kRows + r) : 0.0f;
    }
    float largest = -INFINITY, weights = 0.0f, values = 0.0f;
#pragma unroll
    for (int part = 0; part < kMostParts; ++part) largest = Largest()(largest, top[part]);
#pragma unroll
    for (int part = 0; part < kMostParts; ++part) {
      const float scale = expf(top[part] - shift_of(largest));
      weights = __fmaf_rn(scale, weight[part], weights);
      values = __fmaf_rn(scale, value[part], values);
    }
    put(r, d, values * factor_of(weights, epsilon));
  };
#if !defined(LMD_PLANT_MISSING_BARRIER)  // a test leaves it out to see that this is noticed
  cuda::cluster_sync();
#endif
  for (int i = blocks.rank * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
       i < head_size * kRows; i += blocks.size * static_cast<int>(blockDim.x)) {
    if (i % kRows < rows) add_up(i % kRows, i / kRows);
  }
  cuda::cluster_sync();  // the storages are read
}

// Writes add_up_values' sums, divided, to out_of(r)[d]. With several parts, by way of sums [padded
// head, kRows].
template <int kRows, class T, class ValueAt, class OutOf>
__device__ __forceinline__ void finish_rows(StepStorage& storage, const float* weights, float* sums,
                                            const PositionBlocks& blocks, const PositionPart& part,
                                            const AttentionShape& shape, int rows, ValueAt value_at,
                                            OutOf out_of) {
  const int head_size = static_cast<int>(shape.head_size);
  const auto write = [&](int r, int d, float value) { out_of(r)[d] = ValueOf<T>::from(value); };
  const bool is_whole = part.parts == 1;
  add_up_values<kRows, T>(
      storage, weights, part.size, static_cast<int>(shape.padded_head()), head_size, rows,
      [&](int t) { return value_at(part.begin + t); },
      [&](int r, int d, float sum) {
        if (is_whole) {
          write(r, d, sum * factor_of(storage.sum[r], shape.denominator_epsilon));
        } else {
          sums[d * kRows + r] = sum;
        }
      });
  if (is_whole) return;
  put_parts_together<kRows>(storage, sums, blocks, part.parts, head_size, rows,
                            shape.denominator_epsilon, write);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    decoder_self_attention_kernel(const StepSelfAttentionParams p) {
  using Vector = ElementVector<T>;
  StepStorage& storage = cuda::shared_storage<StepStorage>();
  const int head_size = static_cast<int>(p.shape.head_size);
  const int padded = static_cast<int>(p.shape.padded_head());
  const int capacity = static_cast<int>(p.capacity);
  float* const query = reinterpret_cast<float*>(&storage + 1);
  float* const scores = query + padded;
  const PositionBlocks blocks;
  int32_t* const cache_rows = reinterpret_cast<int32_t*>(scores + part_size(capacity, blocks.size));
  const int64_t heads = p.shape.heads, row_stride = heads * p.capacity * padded;
  const PositionThreads threads;
  for (int64_t item = blocks.item; item < p.rows * heads; item += blocks.items) {
    const int64_t row = item / heads, head = item % heads;
    const int position = p.positions[row];
    T* const out = static_cast<T*>(p.out) + item * head_size;
    if (position < 0 || position >= capacity) {
      if (blocks.rank > 0) continue;
      for (int d = threadIdx.x; d < head_size; d += blockDim.x) out[d] = ValueOf<T>::from(0.0f);
      continue;
    }
    const PositionPart part(position + 1, blocks);
    if (part.parts == 1 && blocks.rank > 0) continue;
    const int last = part.begin + part.size - 1;
    const bool has_own = part.size > 0 && last == position;  // one block writes the new key
    const T* const q = static_cast<const T*>(p.qkv) + (row * 3 * heads + head) * head_size;
    const T* const k = q + heads * head_size;
    const T* const v = k + heads * head_size;
    // The head's, in the first cache row.
    T* const keys = static_cast<T*>(p.keys) + head * p.capacity * padded;
    T* const values = static_cast<T*>(p.values) + head * p.capacity * padded;
    const int64_t own = row * row_stride + static_cast<int64_t>(position) * padded;
    for (int d = threadIdx.x; d < padded; d += blockDim.x) {
      const bool is_real = d < head_size;
      query[d] = is_real ? to_float(q[d]) * p.shape.scale : 0.0f;
      if (!has_own) continue;
      keys[own + d] = is_real ? k[d] : ValueOf<T>::from(0.0f);
      values[own + d] = is_real ? v[d] : ValueOf<T>::from(0.0f);
    }
    // Where the key of a position is: of this step the row's own, which no other row reads.
    for (int t = part.begin + static_cast<int>(threadIdx.x); t <= last; t += blockDim.x) {
      const int32_t entry = p.table[row * p.capacity + t];
      const bool is_own = t == position || entry < 0 || entry >= p.rows;
      cache_rows[t - part.begin] = is_own ? static_cast<int32_t>(row) : entry;
    }
    __syncthreads();
    const auto place = [&](int t) {
      return cache_rows[t - part.begin] * row_stride + static_cast<int64_t>(t) * padded;
    };
    // Lanes stay together: a group without a key reads the last one.
    constexpr int kKeys = step_cuda_tuning::kKeysOfGroup;
    for (int begin = part.begin + threads.group; begin - threads.group_of_warp <= last;
         begin += kKeys * threads.groups) {
      const T* key[kKeys];
      float sum[kKeys] = {};
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        const int t = begin + i * threads.groups;
        key[i] = keys + place(t < last ? t : last);
      }
      for (int d = threads.lane * Vector::kSize; d < padded;
           d += PositionThreads::kLanes * Vector::kSize) {
        Vector part[kKeys];
#pragma unroll
        for (int i = 0; i < kKeys; ++i) part[i] = Vector::load(key[i] + d);
#pragma unroll
        for (int e = 0; e < Vector::kSize; ++e) {
#pragma unroll
          for (int i = 0; i < kKeys; ++i) sum[i] = __fmaf_rn(query[d + e], part[i][e], sum[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        sum[i] = sum_of_group(sum[i]);
        const int t = begin + i * threads.groups;
        if (threads.lane != 0 || t > last) continue;
        if (p.bias != nullptr) sum[i] += p.bias[head * p.bias_stride + position - t];
        scores[t - part.begin] = sum[i];
      }
    }
    __syncthreads();
    float top;
    const float sum = softmax_weights(
        scores, 1, part.size, threadIdx.x, blockDim.x,
        [&](float value, auto operation) {
          return reduce_block(value, storage.reduced, operation);
        },
        &top);
    if (threadIdx.x == 0) {
      storage.top[0] = top;
      storage.sum[0] = sum;
    }
    finish_rows<1, T>(
        storage, scores, query, blocks, part, p.shape, 1, [&](int t) { return values + place(t); },
        [&](int) { return out; });
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    decoder_cross_attention_kernel(const StepCrossAttentionParams p) {
  using Vector = ElementVector<T>;
  constexpr int kRows = step_cuda_tuning::kCrossRows;
  constexpr int kElements = Vector::kSize;
  StepStorage& storage = cuda::shared_storage<StepStorage>();
  const int head_size = static_cast<int>(p.shape.head_size);
  const int padded = static_cast<int>(p.shape.padded_head());
  const int source = static_cast<int>(p.source);
  const int64_t heads = p.shape.heads, groups = cross_groups(p);
  float* const queries = reinterpret_cast<float*>(&storage + 1);
  float* const scores = queries + kRows * padded;
  const PositionThreads threads;
  const PositionBlocks blocks;
  for (int64_t item = blocks.item; item < p.requests * heads * groups; item += blocks.items) {
    const int64_t group = item % groups, head = item / groups % heads;
    const int64_t request = item / groups / heads;
    const int64_t first = group * kRows, left = p.request_rows - first;
    const int rows = left < kRows ? static_cast<int>(left) : kRows;
    const int64_t given = p.lengths[request];
    const PositionPart part(given < 0        ? 0
                            : given < source ? static_cast<int>(given)
                                             : source,
                            blocks);
    if (part.parts == 1 && blocks.rank > 0) continue;
    // Row r of the group, from the first element of the head.
    const auto place = [&](int r) {
      return ((request * p.request_rows + first + r) * heads + head) * head_size;
    };
    for (int i = threadIdx.x; i < kRows * head_size; i += blockDim.x) {
      const int r = i / head_size, d = i % head_size;
      queries[d * kRows + r] =
          r < rows ? to_float(static_cast<const T*>(p.queries)[place(r) + d]) * p.shape.scale
                   : 0.0f;
    }
    __syncthreads();
    const int64_t cache = (request * heads + head) * padded * p.source;
    const T* const keys = static_cast<const T*>(p.keys) + cache + part.begin;
    const T* const values = static_cast<const T*>(p.values) + cache;
    // A group adds up a vector of positions, each lane some elements of the head. Lanes stay
    // together: a group without positions reads the last ones.
    const int vectors = (part.size + kElements - 1) / kElements;
    for (int begin = threads.group - threads.group_of_warp; begin < vectors;
         begin += threads.groups) {
      const int own_vector = begin + threads.group_of_warp;
      const int s = (own_vector < vectors ? own_vector : vectors - 1) * kElements;
      float sum[kElements][kRows] = {};
#pragma unroll 4
      for (int d = threads.lane; d < head_size; d += PositionThreads::kLanes) {
        const Vector key = Vector::load(keys + static_cast<int64_t>(d) * source + s);
        float query[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) query[r] = queries[d * kRows + r];
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            sum[e][r] = __fmaf_rn(query[r], key[e], sum[e][r]);
          }
        }
      }
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          sum[e][r] = sum_of_group(sum[e][r]);
          if (threads.lane == e % PositionThreads::kLanes && own_vector < vectors) {
            scores[(s + e) * kRows + r] = sum[e][r];
          }
        }
      }
    }
    __syncthreads();
    for (int r = cuda::warp_id(); r < kRows; r += blockDim.x / cuda::kWarpSize) {
      float top;
      const float sum = softmax_weights(
          scores + r, kRows, part.size, cuda::lane_id(), cuda::kWarpSize,
          [](float value, auto operation) { return reduce_warp(value, operation); }, &top);
      if (cuda::lane_id() == 0) {
        storage.top[r] = top;
        storage.sum[r] = sum;
      }
    }
    __syncthreads();
    finish_rows<kRows, T>(
        storage, scores, queries, blocks, part, p.shape, rows,
        [&](int t) { return values + static_cast<int64_t>(t) * padded; },
        [&](int r) { return static_cast<T*>(p.out) + place(r); });
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
  // The element at (request, position, keys or values, head, d), or 0 outside.
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
