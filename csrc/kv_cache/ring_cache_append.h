// ring_cache_append_: new keys and values to their slots of a ring. docs/reference/ring_cache.md is
// the user's page.
//
// Each token is written once, and where a chunk is longer than the ring only what stays of it.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "kv_cache/integer_rows.h"

// Slots of a sequence's positions in a ring: pure arithmetic, shared by the CPU and the CUDA
// kernels.
//
// The first num_sinks positions have their own slots, in front. Every other position p is in slot
// num_sinks + (p - num_sinks) mod capacity. So the content of a ring depends only on the number of
// tokens written, not on their chunks.

namespace lmdecode::kv_cache {

struct RingSlots {
  int64_t num_sinks = 0;
  int64_t capacity = 1;  // slots after the sinks', at least 1

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

// The keys, or the values. Vectors of contiguous bytes; strides in bytes.
struct RingStates {
  unsigned char* ring = nullptr;          // [rows, heads, slots], vectors
  const unsigned char* states = nullptr;  // [rows, heads, tokens], vectors
  int64_t vector_bytes = 0;
  int64_t ring_row_stride = 0, ring_head_stride = 0, slot_stride = 0;
  int64_t row_stride = 0, head_stride = 0, token_stride = 0;

  LMD_HOST_DEVICE unsigned char* to(int64_t row, int64_t head, int64_t slot) const {
    return ring + row * ring_row_stride + head * ring_head_stride + slot * slot_stride;
  }
  LMD_HOST_DEVICE const unsigned char* from(int64_t row, int64_t head, int64_t token) const {
    return states + row * row_stride + head * head_stride + token * token_stride;
  }
};

struct RingCacheAppendParams {
  RingStates states[2];  // keys, values; no two share a byte
  RingSlots slots;
  RowLengths positions;  // of the first token, at least 0: how many a row has written
  int64_t rows = 0, heads = 0, tokens = 0;
};

// Positions reach no further.
constexpr int64_t kMaxRingPosition = int64_t{1} << 40;

// Runs on the calling thread and torch's worker threads. Positions are in range: the binding has
// looked.
void ring_cache_append_cpu(const RingCacheAppendParams& params);

// stream is a cudaStream_t; launches only. A row whose position is out of range stays as it is.
void ring_cache_append_cuda(const RingCacheAppendParams& params, void* stream);

}  // namespace lmdecode::kv_cache
