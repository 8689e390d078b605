// How update_beam_indirection_ is laid out on a device: pure arithmetic, no CUDA call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kv_cache/update_beam_indirection.h"

namespace lmdecode::kv_cache {

namespace beam_indirection_cuda_tuning {

// These change speed, never a result.
constexpr int kThreads = 256;
constexpr int kColumns = 32;                // of a block, where they fit: 128 bytes of each row
constexpr int64_t kSharedBytes = 64 << 10;  // so that three blocks fit on a multiprocessor
constexpr int kBlocksPerMultiprocessor = 3;

}  // namespace beam_indirection_cuda_tuning

// In shared memory, for each row, before int32_t [rows, columns].
struct BeamIndirectionRow {
  int32_t parent;
  int32_t length;
};

struct BeamIndirectionLaunch {
  int64_t positions;  // that may change, as far as the host knows
  int32_t columns;    // that a block has at a time: a power of two
  unsigned blocks;
  size_t shared_bytes;
};

inline int64_t beam_indirection_shared_bytes(int64_t rows, int64_t columns) {
  return rows * static_cast<int64_t>(sizeof(BeamIndirectionRow) + columns * sizeof(int32_t));
}

// The most rows of which a block can have a column.
inline int64_t max_beam_indirection_rows(int64_t shared_bytes) {
  return shared_bytes / beam_indirection_shared_bytes(1, 1);
}

inline BeamIndirectionLaunch beam_indirection_launch(const BeamIndirectionParams& params,
                                                     int multiprocessors, int64_t shared_limit) {
  using namespace beam_indirection_cuda_tuning;
  const int64_t rows = params.parents.rows;
  const bool known = params.lengths.rows.data == nullptr;
  BeamIndirectionLaunch launch = {};
  launch.positions =
      known && params.lengths.all < params.capacity ? params.lengths.all + 1 : params.capacity;
  const int64_t room = shared_limit < kSharedBytes ? shared_limit : kSharedBytes;
  launch.columns = kColumns;
  while (launch.columns > 1 && beam_indirection_shared_bytes(rows, launch.columns) > room) {
    launch.columns /= 2;
  }
  const int64_t blocks = (launch.positions + launch.columns - 1) / launch.columns;
  const int64_t most = static_cast<int64_t>(multiprocessors) * kBlocksPerMultiprocessor;
  launch.blocks = static_cast<unsigned>(blocks < most ? blocks : most);
  launch.shared_bytes = static_cast<size_t>(beam_indirection_shared_bytes(rows, launch.columns));
  return launch;
}

}  // namespace lmdecode::kv_cache
