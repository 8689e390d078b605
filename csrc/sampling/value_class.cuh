// The logits that a temperature maps to one value, on the device.
#pragma once

#include "common/cuda_intrinsics.cuh"
#include "sampling/kept_set.h"

namespace lmdecode::sampling::cuda_kernels {

// lowest_logit() with a warp's lanes trying the neighbours of a first guess. All lanes, same
// values.
LMD_OUT_OF_LINE __device__ inline float find_lowest_logit(uint32_t key, float temperature) {
  if (temperature == 1.0f) return value_of_key(key);
  const uint32_t guess = order_key(value_of_key(key) * temperature);
  constexpr uint32_t kLanes = cuda::kWarpSize;
  uint32_t start = guess < kMinusInfinityKey + kLanes / 2 ? kMinusInfinityKey : guess - kLanes / 2;
  if (start > kPlusInfinityKey - (kLanes - 1)) start = kPlusInfinityKey - (kLanes - 1);
  const float value = value_of_key(start + static_cast<uint32_t>(cuda::lane_id()));
  const unsigned reached =
      __ballot_sync(cuda::kFullMask, order_key(tempered(value, temperature)) >= key);
  if (reached != 0 && (reached & 1) == 0) {
    return value_of_key(start + static_cast<uint32_t>(__ffs(static_cast<int>(reached)) - 1));
  }
  return lowest_logit(key, temperature);
}

// The logits that the temperature maps to one value: [lowest, above), above NaN at +inf.
struct ValueClass {
  float lowest, above;
};

// Of the class of `logit`. All lanes of the warp, same values.
__device__ inline ValueClass class_of(float logit, float temperature) {
  const uint32_t key = order_key(tempered(logit, temperature));
  return {find_lowest_logit(key, temperature), key == kPlusInfinityKey
                                                   ? float_of(0x7fc00000u)
                                                   : find_lowest_logit(key + 1, temperature)};
}

}  // namespace lmdecode::sampling::cuda_kernels
