// Elements of a dtype on a GPU, one at a time.
#pragma once

#include "common/cuda_intrinsics.cuh"
#include "common/half.h"

namespace lmdecode::attention::cuda_kernels {

__device__ __forceinline__ void store_element(float* to, float value) { *to = value; }
__device__ __forceinline__ void store_element(Half* to, float value) {
  to->bits = static_cast<uint16_t>(cuda::round_to_f16(value, 0.0f));
}
__device__ __forceinline__ void store_element(BFloat16* to, float value) {
  to->bits = static_cast<uint16_t>(cuda::round_to_bf16(value, 0.0f));
}

}  // namespace lmdecode::attention::cuda_kernels
