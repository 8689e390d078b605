// How reorder_cache_ is laid out on a device: pure arithmetic, no CUDA call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/row_copies.h"
#include "kv_cache/reorder_cache.h"

namespace lmdecode::kv_cache {

namespace reorder_cuda_tuning {

// These change speed, never a result.
constexpr int kThreads = 256;
// Units that a thread carries through all copies at a time: its loads under way.
constexpr int kUnitsPerThread = 4;
constexpr int kBlocksPerMultiprocessor = 4;

}  // namespace reorder_cuda_tuning

// Tensors of one launch: their descriptions are kernel parameters, of which there are 4 KB.
constexpr int kTensorsPerLaunch = 24;

// A tensor as columns of rows: unit i of each row lies at one offset, `unit_bytes` long, aligned.
struct ReorderColumns {
  CacheRows rows;
  int64_t units = 0;       // of a row
  int32_t unit_bytes = 1;  // 1, 2, 4, 8 or 16
};

// Block b takes slices b, b + blocks, ... of the columns of all tensors, each over all rows.
struct ReorderLaunch {
  ReorderColumns tensors[kTensorsPerLaunch];
  int64_t first_slice[kTensorsPerLaunch + 1] = {};  // of each tensor; the last: of all
  ParentRows parents;
  int32_t count = 0;
};
static_assert(sizeof(ReorderLaunch) <= 4096);

// In shared memory, before RowCopyMemory (thread_block_row_copies.cuh).
struct ReorderStorage {
  alignas(8) int32_t copy_count;
};

inline size_t reorder_shared_bytes(int64_t rows) {
  return sizeof(ReorderStorage) + static_cast<size_t>(row_copy_bytes(rows));
}

// The most rows whose RowCopyMemory fits.
inline int64_t max_reorder_rows(int64_t shared_bytes) {
  const int64_t bytes_a_row = 3 * sizeof(RowCopy) / 2 + 2 * sizeof(int32_t);
  const int64_t left = shared_bytes - static_cast<int64_t>(sizeof(ReorderStorage));
  return left > 0 ? left / bytes_a_row : 0;
}

inline ReorderColumns make_reorder_columns(const CacheRows& rows) {
  int64_t bits = reinterpret_cast<intptr_t>(rows.data) | rows.row_stride | rows.segment_bytes | 16;
  for (int d = 0; d < rows.dims; ++d) bits |= rows.stride[d];
  ReorderColumns columns;
  columns.rows = rows;
  columns.unit_bytes = static_cast<int32_t>(bits & -bits);
  columns.units = rows.segments() * (rows.segment_bytes / columns.unit_bytes);
  return columns;
}

// The next tensors of the call, from *at on, which is set behind them; empty ones are left out.
// threads: of a block.
inline ReorderLaunch next_reorder_launch(const ReorderCacheParams& params, int64_t* at,
                                         int threads = reorder_cuda_tuning::kThreads) {
  ReorderLaunch launch;
  launch.parents = params.parents;
  for (; *at < params.count && launch.count < kTensorsPerLaunch; ++*at) {
    if (params.tensors[*at].segment_bytes == 0) continue;
    const ReorderColumns columns = make_reorder_columns(params.tensors[*at]);
    const int64_t slice = int64_t{threads} * reorder_cuda_tuning::kUnitsPerThread;
    const int32_t i = launch.count++;
    launch.tensors[i] = columns;
    launch.first_slice[i + 1] = launch.first_slice[i] + (columns.units + slice - 1) / slice;
  }
  return launch;
}

inline int64_t reorder_blocks(const ReorderLaunch& launch, int multiprocessors) {
  const int64_t slices = launch.first_slice[launch.count];
  const int64_t most =
      static_cast<int64_t>(multiprocessors) * reorder_cuda_tuning::kBlocksPerMultiprocessor;
  return slices < most ? slices : most;
}

}  // namespace lmdecode::kv_cache
