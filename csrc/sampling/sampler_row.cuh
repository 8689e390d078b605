// The row of a Sampler as a block of threads sees it: the logits as they came, and a copy in which
// they count, which the stages narrow.
#pragma once

#include "common/cuda_intrinsics.cuh"
#include "common/half.h"
#include "sampling/adaptive_p.h"
#include "sampling/row_cluster.cuh"

namespace lmdecode::sampling::cuda_kernels {

// As they came: of dtype T, any stride.
template <class T>
struct RawRow {
  const T* x;
  int64_t stride;
  uint32_t vocab;

  __device__ float at(int64_t token) const { return to_float(x[token * stride]); }

  // see(logit, token) for each logit, once, by any thread.
  template <class See>
  __device__ void each(See see) const {
    const RawRow row = *this;  // in registers, whatever see() writes
    for (uint32_t token = threadIdx.x; token < row.vocab; token += blockDim.x) {
      see(row.at(token), token);
    }
  }
};

// After the edits, without NaN, in the block's scratch memory. Tokens that are not left are -inf.
// Passes give each token to the same thread, so that none waits for another between them.
struct EditedRow {
  // [vocab] logits, probabilities where these are adapted; whole vectors of four, aligned to 16.
  float* value;
  uint32_t vocab;
  bool adapts = false;  // adaptive-p makes other logits of the tokens that are left
  float target = 0.0f;
  // Few tokens, among which all are that are left; 0: none are listed.
  const uint32_t* list = nullptr;
  uint32_t listed = 0;

  __device__ bool has(uint32_t token) const { return value[token] > minus_infinity(); }

  // The logit of a token that is left.
  __device__ float at(int64_t token) const { return logit_of(value[token]); }

  // see(logit, token) for each token that is left, once, by any thread.
  template <class See>
  __device__ void each(See see) const {
    const EditedRow row = *this;  // in registers, whatever see() writes
    // A vector of four, or a token of the list.
    const uint32_t count = row.list != nullptr ? row.listed : (row.vocab + 3) / 4;
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
      uint32_t token = 4 * i, end = token + 4 < row.vocab ? token + 4 : row.vocab;
      float first, second = 0.0f, third = 0.0f, fourth = 0.0f;
      if (row.list != nullptr) {
        token = row.list[i];
        end = token + 1;
        first = row.value[token];
      } else {
        const float4 four = reinterpret_cast<const float4*>(row.value)[i];
        first = four.x, second = four.y, third = four.z, fourth = four.w;
      }
#pragma unroll 1
      for (; token < end; ++token) {
        if (first > minus_infinity()) see(row.logit_of(first), token);
        first = second, second = third, third = fourth;
      }
    }
  }

  // Drops the tokens for which drops(logit, token).
  template <class Drops>
  __device__ void drop(Drops drops) const {
    each([to = value, &drops](float logit, uint32_t token) {
      if (drops(logit, token)) to[token] = minus_infinity();
    });
  }

  // The same; where few stay, passes see these alone from now on. All threads of the block.
  template <class Drops>
  __device__ void drop_and_list(RowStorage& storage, Drops drops) {
    if (list != nullptr) return drop(drops);
    constexpr uint32_t kRoom = cuda_tuning::kListedLogits;
    RowList& to = storage.list;
    if (threadIdx.x == 0) to.size = 0;
    __syncthreads();
    bool has_room = true;
    each([&, values = value](float logit, uint32_t token) {
      if (drops(logit, token)) {
        values[token] = minus_infinity();
      } else if (has_room) {
        const uint32_t place = atomicAdd(&to.size, 1u);
        has_room = place < kRoom;
        if (has_room) to.token[place] = token;
      }
    });
    __syncthreads();
    if (to.size > kRoom) return;
    list = to.token;
    listed = to.size;
  }

 private:
  __device__ float logit_of(float value_of_token) const {
    return adapts ? adapted_logit(value_of_token, target) : value_of_token;
  }
};

}  // namespace lmdecode::sampling::cuda_kernels
