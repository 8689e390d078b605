// Values of a dtype, and reductions of a warp and a block: the kernels of a decoder's step.
#pragma once

#include "common/cuda_intrinsics.cuh"
#include "common/half.h"
#include "decoder/step_launch.h"

namespace lmdecode::decoder {

// A dtype's value from float32, rounded to nearest even: the inverse of common/half.h.
template <class T>
struct ValueOf;

template <>
struct ValueOf<float> {
  LMD_HOST_DEVICE static float from(float value) { return value; }
};

template <>
struct ValueOf<BFloat16> {
  LMD_HOST_DEVICE static BFloat16 from(float value) {
    const uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fc0};
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
  }
};

template <>
struct ValueOf<Half> {
  LMD_HOST_DEVICE static Half from(float value) {
    const uint32_t sign = (bits_of(value) >> 16) & 0x8000u;
    const uint32_t bits = bits_of(value) & 0x7fffffffu;
    uint32_t magnitude;
    if (bits > 0x7f800000u) {
      magnitude = 0x7e00u;
    } else if (bits >= 0x477ff000u) {  // halfway from the largest to the next
      magnitude = 0x7c00u;
    } else if (bits < 0x38800000u) {
      // Beside 0.5 the last bit of an f32 is 2^-24, the last bit of a subnormal f16.
      magnitude = bits_of(float_of(bits) + 0.5f) - 0x3f000000u;
    } else {
      magnitude = (bits + 0xfffu + ((bits >> 13) & 1u) - 0x38000000u) >> 13;
    }
    return {static_cast<uint16_t>(sign | magnitude)};
  }
};

}  // namespace lmdecode::decoder

namespace lmdecode::decoder::step_cuda_kernels {

using step_cuda_tuning::kThreads;

struct Sum {
  __device__ float operator()(float a, float b) const { return a + b; }
};

// Ignores NaN, which returns with the sum of weights.
struct Largest {
  __device__ float operator()(float a, float b) const { return a > b || b != b ? a : b; }
};

template <class Operation>
__device__ __forceinline__ float reduce_warp(float value, Operation operation) {
  for (int lanes = cuda::kWarpSize / 2; lanes > 0; lanes /= 2) {
    value = operation(value, __shfl_xor_sync(cuda::kFullMask, value, lanes));
  }
  return value;
}

// Reduces over all threads; each gets the result. Begins and ends with a barrier.
template <class Operation>
__device__ __forceinline__ float reduce_block(float value, float* reduced, Operation operation) {
  value = reduce_warp(value, operation);
  __syncthreads();
  if (cuda::lane_id() == 0) reduced[cuda::warp_id()] = value;
  __syncthreads();
  float all = reduced[0];
  for (unsigned warp = 1; warp < blockDim.x / cuda::kWarpSize; ++warp) {
    all = operation(all, reduced[warp]);
  }
  return all;
}

}  // namespace lmdecode::decoder::step_cuda_kernels
