// reorder_cache_ on a GPU: in place, without a second buffer, and without the host knowing the
// parents. docs/reference/kv_cache.md has the semantics.
//
// Each block finds the order of the copies (thread_block_row_copies.cuh) in its shared memory. A
// thread then owns some columns, the same few bytes of every row, and carries them through all
// copies; the temporary row of a cycle is in its registers. No thread reads what another one
// writes, so that nothing has to wait between copies.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cuda_intrinsics.cuh"
#include "common/row_copies.h"
#include "kv_cache/reorder_cache.h"

// How reorder_cache_ is laid out on a device: pure arithmetic, no CUDA call.

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
  int64_t first_slice[kTensorsPerLaunch + 1] = {};  // by tensor; the last: the total
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

// The launch of the next tensors from *at on; advances *at past them. Skips empty tensors. threads:
// of a block.
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

// The order of the copies of a parent map, found by a block in its shared memory.

// row_copy_bytes(rows) of shared memory.
struct RowCopyMemory {
  RowCopy* copies;   // [max_row_copies(rows)]
  int32_t* parents;  // [rows]
  int32_t* readers;  // [rows]

  __device__ RowCopyMemory(void* shared, int32_t rows)
      : copies(static_cast<RowCopy*>(shared)),
        parents(reinterpret_cast<int32_t*>(copies + max_row_copies(rows))),
        readers(parents + rows) {}
};

// Called by all threads of a block. parent_of(row): its parent, in range. Returns to all threads
// whether a row moves. If one does, the *copy_count copies (in shared memory too) are visible to
// every thread.
template <class ParentOf>
__device__ bool find_row_copies(const RowCopyMemory& memory, int32_t rows, int32_t* copy_count,
                                ParentOf parent_of) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t threads = static_cast<int32_t>(blockDim.x);
  for (int32_t row = thread; row < rows; row += threads) memory.readers[row] = 0;
  __syncthreads();
  bool moves = false;
  for (int32_t row = thread; row < rows; row += threads) {
    const int32_t parent = parent_of(row);
    memory.parents[row] = parent;
    if (parent == row) continue;
    moves = true;
    atomicAdd(&memory.readers[parent], 1);
  }
  if (__syncthreads_or(moves) == 0) return false;
  if (thread == 0) {
    *copy_count = order_row_copies(memory.parents, rows, memory.readers, memory.copies);
  }
#if !defined(LMD_PLANT_MISSING_BARRIER)  // a test leaves it out to see that this is noticed
  __syncthreads();
#endif
  return true;
}

}  // namespace lmdecode::kv_cache

namespace lmdecode::kv_cache::reorder_cuda {

// Byte offset of a unit in its row. 64-bit divisions are slow, and next to never needed.
template <class Index>
__device__ int64_t offset_of(const ReorderColumns& t, Index unit) {
  const Index in_segment = static_cast<Index>(t.rows.segment_bytes / t.unit_bytes);
  Index rest = unit / in_segment;
  int64_t offset = static_cast<int64_t>(unit - rest * in_segment) * t.unit_bytes;
  for (int d = t.rows.dims - 1; d >= 0; --d) {
    const Index size = static_cast<Index>(t.rows.size[d]);
    const Index quotient = rest / size;
    offset += static_cast<int64_t>(rest - quotient * size) * t.rows.stride[d];
    rest = quotient;
  }
  return offset;
}

template <class Unit>
__device__ void reorder_slice(const ReorderColumns& t, int64_t first, const RowCopy* copies,
                              int32_t copy_count) {
  constexpr int kUnits = reorder_cuda_tuning::kUnitsPerThread;
  unsigned char* column[kUnits];  // null: past the last one
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int64_t unit = first + u * static_cast<int64_t>(blockDim.x) + threadIdx.x;
    column[u] = nullptr;
    if (unit >= t.units) continue;
    const bool is_short = t.units <= 0xffffffffll;
    column[u] = t.rows.data + (is_short ? offset_of(t, static_cast<uint32_t>(unit))
                                        : offset_of(t, static_cast<uint64_t>(unit)));
  }
  Unit temporary[kUnits] = {};
  for (int32_t i = 0; i < copy_count; ++i) {
    const RowCopy copy = copies[i];
    Unit value[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      value[u] = temporary[u];
      if (copy.from != kTemporaryRow && column[u] != nullptr) {
        value[u] = *reinterpret_cast<const Unit*>(column[u] + copy.from * t.rows.row_stride);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (copy.to == kTemporaryRow) {
        temporary[u] = value[u];
      } else if (column[u] != nullptr) {
        *reinterpret_cast<Unit*>(column[u] + copy.to * t.rows.row_stride) = value[u];
      }
    }
  }
}

__device__ inline void reorder_any_slice(const ReorderColumns& t, int64_t first,
                                         const RowCopy* copies, int32_t copy_count) {
  switch (t.unit_bytes) {
    case 16:
      return reorder_slice<uint4>(t, first, copies, copy_count);
    case 8:
      return reorder_slice<uint2>(t, first, copies, copy_count);
    case 4:
      return reorder_slice<uint32_t>(t, first, copies, copy_count);
    case 2:
      return reorder_slice<uint16_t>(t, first, copies, copy_count);
    default:
      return reorder_slice<uint8_t>(t, first, copies, copy_count);
  }
}

__global__ void __launch_bounds__(reorder_cuda_tuning::kThreads,
                                  reorder_cuda_tuning::kBlocksPerMultiprocessor)
    reorder_cache_kernel(const ReorderLaunch launch) {
  ReorderStorage& storage = cuda::shared_storage<ReorderStorage>();
  const int32_t rows = launch.parents.rows;
  const RowCopyMemory memory(&storage + 1, rows);
  const bool moves = find_row_copies(memory, rows, &storage.copy_count, [&](int32_t row) {
    const int64_t parent = launch.parents.at(row);
    return launch.parents.contains(parent) ? static_cast<int32_t>(parent) : row;
  });
  if (!moves) return;
  const int64_t slices = launch.first_slice[launch.count];
  const int64_t slice_units =
      static_cast<int64_t>(blockDim.x) * reorder_cuda_tuning::kUnitsPerThread;
  int32_t tensor = 0;
  for (int64_t slice = blockIdx.x; slice < slices; slice += gridDim.x) {
    while (slice >= launch.first_slice[tensor + 1]) ++tensor;
    reorder_any_slice(launch.tensors[tensor], (slice - launch.first_slice[tensor]) * slice_units,
                      memory.copies, storage.copy_count);
  }
}

}  // namespace lmdecode::kv_cache::reorder_cuda
