// The tensors that rows are read from and written to on a GPU.
#pragma once

#include "attention/attention_rows.h"
#include "attention/decode_launch.h"
#include "attention/element.cuh"
#include "attention/row_total.h"

namespace lmdecode::attention::cuda_kernels {

// A query of a head.
template <class T>
__device__ const T* query_of(const SlidingWindowAttentionParams& p, const AttentionRows& rows,
                             int row) {
  const AttentionStrides& s = p.q_strides;
  return static_cast<const T*>(p.q) + rows.sequence.index * s.sequence + rows.head(row) * s.head +
         (rows.sequence.first_query + rows.token(row)) * s.token;
}

// Keys or values of a KV head of a sequence, wherever they lie: the one place that knows.
template <class T>
struct CacheRows {
  const T* data;  // of the KV head, the first token of a ragged sequence
  const AttentionStrides& strides;
  const KeyPlaces& places;
  int64_t sequence;

  __device__ CacheRows(const SlidingWindowAttentionParams& p, const void* tensor,
                       const AttentionStrides& s, const AttentionRows& rows)
      : data(static_cast<const T*>(tensor) + rows.kv_head * s.head +
             rows.sequence.first_key * s.token),
        strides(s),
        places(p.places),
        sequence(rows.sequence.index) {}

  // Null where a table says what cannot be.
  __device__ const T* row(int64_t key) const {
    const KeyPlace at = places.place(sequence, key);
    if (places.has_table() && (at.row < 0 || at.row >= places.rows)) return nullptr;
    return data + at.row * strides.sequence + at.token * strides.token;
  }
};

// The keys of each row to shared memory, and what some and all rows see; by all threads, which may
// read them after a barrier.
__device__ __forceinline__ void find_row_keys(const SlidingWindowAttentionParams& p,
                                              const AttentionRows& rows, int most_rows,
                                              KeyRange* keys) {
  for (int row = static_cast<int>(threadIdx.x); row < most_rows;
       row += static_cast<int>(blockDim.x)) {
    keys[row] = row < rows.count ? rows.sequence.keys_seen(p, rows.token(row)) : KeyRange{0, 0};
  }
}

__device__ __forceinline__ RowsKeys keys_of_rows(const KeyRange* keys, int count) {
  RowsKeys found = RowsKeys::of_no_row();
  for (int row = cuda::lane_id(); row < count; row += cuda::kWarpSize) found.add(keys[row]);
  for (int offset = cuda::kWarpSize / 2; offset > 0; offset /= 2) {
    const auto other = [&](int64_t value) {
      return static_cast<int64_t>(
          __shfl_xor_sync(cuda::kFullMask, static_cast<long long>(value), offset));
    };
    found.some = {min_of(found.some.begin, other(found.some.begin)),
                  max_of(found.some.end, other(found.some.end))};
    found.all = {max_of(found.all.begin, other(found.all.begin)),
                 min_of(found.all.end, other(found.all.end))};
  }
  return found;
}

// Writes finished rows. max: an exponent of two; sum: the sum of the weights.
template <class T>
struct FinishedRows {
  const SlidingWindowAttentionParams& p;
  const AttentionRows& rows;

  struct Row {
    T* to;
    int64_t size;
    float scale;  // f32: a divisor; others, which are rounded anyway: a factor

    __device__ float result(float value) const {
      return sizeof(T) == 2 ? value * scale : value / scale;
    }
    __device__ void put(int64_t column, float value) const {
      if (column < size) store_element(to + column, result(value));
    }
    __device__ void put_pair(int64_t column, float first, float second) const {
      if constexpr (sizeof(T) == 2) {
        if (size % 2 == 0) {
          if (column >= size) return;
          T pair[2];
          store_element(pair, result(first));
          store_element(pair + 1, result(second));
          *reinterpret_cast<ushort2*>(to + column) = make_ushort2(pair[0].bits, pair[1].bits);
          return;
        }
      }
      put(column, first);
      put(column + 1, second);
    }
  };

  // writes_lse: true for one of the threads that share a row.
  __device__ Row row(int row, float max, float sum, bool writes_lse) const {
    const int64_t head = rows.head(row), sequence = rows.sequence.index;
    const int64_t token = rows.sequence.first_query + rows.token(row);
    const RowTotal total = RowTotal::of(static_cast<double>(max), static_cast<double>(sum),
                                        p.sinks == nullptr ? nullptr : p.sinks + head);
    if (p.lse != nullptr && writes_lse) {
      p.lse[sequence * p.lse_strides.sequence + head * p.lse_strides.head +
            token * p.lse_strides.token] = total.lse();
    }
    T* const to = static_cast<T*>(p.out) + sequence * p.out_strides.sequence +
                  head * p.out_strides.head + token * p.out_strides.token;
    const float divisor = total.is_empty() ? 1.0f : total.divisor;
    return {to, p.value_size, sizeof(T) == 2 ? 1.0f / divisor : divisor};
  }
};

// Rows of a part of a cache go to its slot; row `first_row` of the KV head is row 0.
struct PartRows {
  const DecodeParts& partials;
  int64_t slot;
  int64_t first_row;

  struct Row {
    float* to;
    int64_t size;

    __device__ void put(int64_t column, float value) const {
      if (column < size) to[column] = value;
    }
    __device__ void put_pair(int64_t column, float first, float second) const {
      put(column, first);
      put(column + 1, second);
    }
  };

  __device__ Row row(int row, float max, float sum, bool writes_sums) const {
    const int64_t at = slot * partials.rows + first_row + row;
    if (writes_sums) {
      partials.row_max[at] = max;
      partials.row_sum[at] = sum;
    }
    return {partials.out + at * partials.out_stride, partials.out_stride};
  }
};

}  // namespace lmdecode::attention::cuda_kernels
