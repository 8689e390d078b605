// The row of a Sampler as a block of threads sees it: the logits as they came, and a copy in which
// they count, which the stages narrow.
#pragma once

#include "common/cuda_intrinsics.cuh"
#include "common/half.h"
#include "sampling/adaptive_p.h"

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
  float* value;  // [vocab] logits; probabilities where these are adapted
  uint32_t vocab;
  bool adapts = false;  // adaptive-p makes other logits of the tokens that are left
  float target = 0.0f;

  __device__ bool has(uint32_t token) const { return value[token] > minus_infinity(); }

  // The logit of a token that is left.
  __device__ float at(int64_t token) const {
    return adapts ? adapted_logit(value[token], target) : value[token];
  }

  // see(logit, token) for each token that is left.
  template <class See>
  __device__ void each(See see) const {
    const EditedRow row = *this;  // in registers, whatever see() writes
    for (uint32_t token = threadIdx.x; token < row.vocab; token += blockDim.x) {
      if (row.has(token)) see(row.at(token), token);
    }
  }

  // Drops the tokens for which drops(logit, token).
  template <class Drops>
  __device__ void drop(Drops drops) const {
    each([to = value, &drops](float logit, uint32_t token) {
      if (drops(logit, token)) to[token] = minus_infinity();
    });
  }
};

}  // namespace lmdecode::sampling::cuda_kernels
