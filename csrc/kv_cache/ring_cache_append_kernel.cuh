// ring_cache_append_ on a GPU. No two tokens that are held go to one slot, so that nothing has to
// wait.
#pragma once

#include <cstdint>

#include "common/cuda_intrinsics.cuh"
#include "kv_cache/ring_cache_append.h"

// How ring_cache_append_ is laid out on a device: pure arithmetic, no CUDA call.

namespace lmdecode::kv_cache {

namespace ring_append_cuda_tuning {

// These change speed, never a result.
constexpr int kThreads = 128;
constexpr int kBlocksPerMultiprocessor = 16;

}  // namespace ring_append_cuda_tuning

// A thread takes units t, t + threads, ...: a unit is the part of a vector that one copy moves. All
// units of the keys come first, then all of the values; units of a vector are neighbours.
struct RingAppendLaunch {
  RingCacheAppendParams params;
  int32_t unit_bytes[2] = {};  // 1, 2, 4, 8 or 16
  int64_t units[2] = {};       // of a vector
  int64_t vectors = 0;         // of the keys, or of the values
};

inline RingAppendLaunch ring_append_launch(const RingCacheAppendParams& params) {
  RingAppendLaunch launch;
  launch.params = params;
  launch.vectors = params.rows * params.heads * params.tokens;
  for (int i = 0; i < 2; ++i) {
    const RingStates& s = params.states[i];
    const int64_t bits = reinterpret_cast<intptr_t>(s.ring) | reinterpret_cast<intptr_t>(s.states) |
                         s.ring_row_stride | s.ring_head_stride | s.slot_stride | s.row_stride |
                         s.head_stride | s.token_stride | s.vector_bytes | 16;
    launch.unit_bytes[i] = static_cast<int32_t>(bits & -bits);
    launch.units[i] = s.vector_bytes / launch.unit_bytes[i];
  }
  return launch;
}

inline int64_t ring_append_units(const RingAppendLaunch& launch) {
  return launch.vectors * (launch.units[0] + launch.units[1]);
}

inline int64_t ring_append_blocks(const RingAppendLaunch& launch, int multiprocessors,
                                  int threads = ring_append_cuda_tuning::kThreads) {
  const int64_t blocks = (ring_append_units(launch) + threads - 1) / threads;
  const int64_t most =
      static_cast<int64_t>(multiprocessors) * ring_append_cuda_tuning::kBlocksPerMultiprocessor;
  return blocks < most ? blocks : most;
}

}  // namespace lmdecode::kv_cache

namespace lmdecode::kv_cache::ring_append_cuda {

template <class Unit>
__device__ void copy_unit(unsigned char* to, const unsigned char* from, int64_t unit) {
  reinterpret_cast<Unit*>(to)[unit] = reinterpret_cast<const Unit*>(from)[unit];
}

__global__ void __launch_bounds__(ring_append_cuda_tuning::kThreads)
    ring_cache_append_kernel(const RingAppendLaunch launch) {
  const RingCacheAppendParams& params = launch.params;
  const int64_t of_keys = launch.vectors * launch.units[0];
  const int64_t all = of_keys + launch.vectors * launch.units[1];
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < all;
       at += threads) {
    const int which = at < of_keys ? 0 : 1;
    const int64_t index = at < of_keys ? at : at - of_keys;
    const int64_t vector = index / launch.units[which];
    const int64_t token = vector % params.tokens;
    const int64_t head = vector / params.tokens % params.heads;
    const int64_t row = vector / params.tokens / params.heads;
    const int64_t begin = params.positions.at(row);
    if (begin < 0 || begin > kMaxRingPosition) continue;
    if (!params.slots.holds(begin + token, begin + params.tokens)) continue;
    const RingStates& states = params.states[which];
    unsigned char* const to = states.to(row, head, params.slots.slot(begin + token));
    const unsigned char* const from = states.from(row, head, token);
    const int64_t unit = index - vector * launch.units[which];
    switch (launch.unit_bytes[which]) {
      case 16:
        copy_unit<uint4>(to, from, unit);
        break;
      case 8:
        copy_unit<uint2>(to, from, unit);
        break;
      case 4:
        copy_unit<uint32_t>(to, from, unit);
        break;
      case 2:
        copy_unit<uint16_t>(to, from, unit);
        break;
      default:
        copy_unit<uint8_t>(to, from, unit);
    }
  }
}

}  // namespace lmdecode::kv_cache::ring_append_cuda
