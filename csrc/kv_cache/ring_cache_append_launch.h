// How ring_cache_append_ is laid out on a device: pure arithmetic, no CUDA call.
#pragma once

#include <cstdint>

#include "kv_cache/ring_cache_append.h"

namespace lmdecode::kv_cache {

namespace ring_append_cuda_tuning {

// These change speed, never a result.
constexpr int kThreads = 128;
constexpr int kBlocksPerMultiprocessor = 16;

}  // namespace ring_append_cuda_tuning

// A thread takes units t, t + threads, ...: a unit is what it copies at once of one vector. All
// units of the keys come first, then those of the values; those of a vector are neighbours.
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
