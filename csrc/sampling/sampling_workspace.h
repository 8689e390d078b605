// The scratch memory of one thread of top_k_top_p_sample on the CPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/host_device.h"

namespace lmdecode::sampling {

struct SamplingWorkspace {
  uint64_t* mass;
  uint64_t* spare_mass;
  float* value;
  uint32_t* token;
  uint32_t* key;
  uint32_t* spare_key;
  float* row;
};

// Elements of each array: whole vectors are stored at any element, whatever the SIMD width.
LMD_HOST_DEVICE int64_t sampling_workspace_capacity(int64_t vocab) {
  return (vocab + 63) / 64 * 64 + 128;
}

LMD_HOST_DEVICE size_t sampling_workspace_bytes(int64_t vocab) {
  return static_cast<size_t>(sampling_workspace_capacity(vocab)) *
         (2 * sizeof(uint64_t) + 5 * sizeof(uint32_t));
}

LMD_HOST_DEVICE SamplingWorkspace split_sampling_workspace(void* memory, int64_t vocab) {
  const int64_t n = sampling_workspace_capacity(vocab);
  SamplingWorkspace w;
  w.mass = static_cast<uint64_t*>(memory);
  w.spare_mass = w.mass + n;
  w.value = reinterpret_cast<float*>(w.spare_mass + n);
  w.token = reinterpret_cast<uint32_t*>(w.value + n);
  w.key = w.token + n;
  w.spare_key = w.key + n;
  w.row = reinterpret_cast<float*>(w.spare_key + n);
  return w;
}

}  // namespace lmdecode::sampling
