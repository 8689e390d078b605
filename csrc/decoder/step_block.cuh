// What the threads of a block find out together.
#pragma once

#include "common/cuda_intrinsics.cuh"
#include "decoder/step_launch.h"

namespace lmdecode::decoder::step_cuda_kernels {

using step_cuda_tuning::kThreads;

struct Sum {
  __device__ float operator()(float a, float b) const { return a + b; }
};

// NaN loses, and comes back with the sum of weights.
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

// Of all threads, the same in each. A barrier lies before and behind.
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
