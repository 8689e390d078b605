// How update_beam_indirection_ is laid out on a device: pure arithmetic, no CUDA call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/row_copies.h"
#include "kv_cache/update_beam_indirection.h"

namespace lmdecode::kv_cache {

namespace beam_indirection_cuda_tuning {

// These change speed, never a result.
constexpr int kThreads = 128;
constexpr int kBlocksPerMultiprocessor = 2;

}  // namespace beam_indirection_cuda_tuning

// In shared memory, before the plan (block_row_copies.cuh) and int32_t lengths[rows].
struct BeamIndirectionStorage {
  alignas(8) int32_t copy_count;
};

inline int64_t beam_indirection_shared_bytes(int64_t rows) {
  return static_cast<int64_t>(sizeof(BeamIndirectionStorage)) + row_plan_bytes(rows) +
         rows * static_cast<int64_t>(sizeof(int32_t));
}

// The most rows whose plan fits.
inline int64_t max_beam_indirection_rows(int64_t shared_bytes) {
  const int64_t bytes_a_row = 3 * sizeof(RowCopy) / 2 + 3 * sizeof(int32_t);
  const int64_t left = shared_bytes - static_cast<int64_t>(sizeof(BeamIndirectionStorage));
  return left > 0 ? left / bytes_a_row : 0;
}

// Positions that may change, as far as the host knows.
inline int64_t beam_indirection_positions(const BeamIndirectionParams& params) {
  const bool known = params.lengths.rows.data == nullptr;
  return known && params.lengths.all < params.capacity ? params.lengths.all + 1 : params.capacity;
}

inline int64_t beam_indirection_blocks(int64_t positions, int multiprocessors,
                                       int threads = beam_indirection_cuda_tuning::kThreads) {
  const int64_t blocks = (positions + threads - 1) / threads;
  const int64_t most = static_cast<int64_t>(multiprocessors) *
                       beam_indirection_cuda_tuning::kBlocksPerMultiprocessor;
  return blocks < most ? blocks : most;
}

}  // namespace lmdecode::kv_cache
