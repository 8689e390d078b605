// update_beam_indirection_ on a GPU, in place. docs/reference/kv_cache.md has the semantics.
//
// A block owns columns of the table, which no other block reads or writes. Its threads read the new
// entries of all rows, meet at a barrier, and write them, so the order of the parents does not
// matter.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cuda_intrinsics.cuh"
#include "kv_cache/update_beam_indirection.h"

// How update_beam_indirection_ is laid out on a device: pure arithmetic, no CUDA call.

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

// The most rows for which a column fits into a block.
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

namespace lmdecode::kv_cache::beam_indirection_cuda {

__global__ void __launch_bounds__(beam_indirection_cuda_tuning::kThreads)
    update_beam_indirection_kernel(const BeamIndirectionParams params,
                                   const BeamIndirectionLaunch launch) {
  constexpr int32_t kStays = -1;  // in place of a length
  BeamIndirectionRow* const known = &cuda::shared_storage<BeamIndirectionRow>();
  const int32_t rows = params.parents.rows, columns = launch.columns;
  int32_t* const read = reinterpret_cast<int32_t*>(known + rows);  // [rows, columns]
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t threads = static_cast<int32_t>(blockDim.x);
  for (int32_t row = thread; row < rows; row += threads) {
    const int64_t parent = params.parents.at(row), length = params.lengths.at(row);
    const bool valid = params.parents.contains(parent) && length >= 0 && length <= params.capacity;
    known[row] = {valid ? static_cast<int32_t>(parent) : row,
                  valid ? static_cast<int32_t>(length) : kStays};
  }
  __syncthreads();
  const int32_t column = thread % columns, first = thread / columns, step = threads / columns;
  for (int64_t begin = static_cast<int64_t>(blockIdx.x) * columns; begin < launch.positions;
       begin += static_cast<int64_t>(gridDim.x) * columns) {
    const int64_t position = begin + column;
    const bool is_there = position < launch.positions;
    int32_t* const entries = params.table + position;
#pragma unroll 8
    for (int32_t row = first; row < rows; row += step) {
      const BeamIndirectionRow of_row = known[row];
      if (is_there && position < of_row.length && of_row.parent != row) {
        read[row * columns + column] = entries[of_row.parent * params.row_stride];
      }
    }
#if !defined(LMD_PLANT_MISSING_BARRIER)  // a test leaves it out to see that this is noticed
    __syncthreads();
#endif
    // A thread writes the entries that it has read itself.
#pragma unroll 8
    for (int32_t row = first; row < rows; row += step) {
      const BeamIndirectionRow of_row = known[row];
      const bool moves = position < of_row.length && of_row.parent != row;
      if (is_there && (moves || position == of_row.length)) {
        entries[row * params.row_stride] = moves ? read[row * columns + column] : row;
      }
    }
  }
}

}  // namespace lmdecode::kv_cache::beam_indirection_cuda
