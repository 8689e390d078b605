// Slots of a sequence's positions in a ring: pure arithmetic, shared by the CPU and the CUDA
// kernels.
//
// The first num_sinks positions have their own slots, in front. Every other position p is in slot
// num_sinks + (p - num_sinks) mod capacity. So the content of a ring depends only on the number of
// tokens written, not on their chunks.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace lmdecode::kv_cache {

struct RingSlots {
  int64_t num_sinks = 0;
  int64_t capacity = 1;  // slots behind those of the sinks, at least 1

  LMD_HOST_DEVICE int64_t slot(int64_t position) const {
    if (position < num_sinks) return position;
    return num_sinks + (position - num_sinks) % capacity;
  }

  // Whether a position is still held once all positions below `end` have been written.
  LMD_HOST_DEVICE bool holds(int64_t position, int64_t end) const {
    return position < num_sinks || position >= end - capacity;
  }

  // Number of positions of [position, end) that are in consecutive slots, at least 1.
  LMD_HOST_DEVICE int64_t run_length(int64_t position, int64_t end) const {
    const int64_t limit =
        position < num_sinks ? num_sinks : position + num_sinks + capacity - slot(position);
    return (limit < end ? limit : end) - position;
  }
};

}  // namespace lmdecode::kv_cache
