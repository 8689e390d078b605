// reorder_cache_ on a GPU: in place, without a second buffer, and without the host knowing the
// parents. docs/reference/kv_cache.md has the semantics.
//
// Each block finds the order of the copies (thread_block_row_copies.cuh) in its shared memory. A
// thread then owns some columns, the same few bytes of every row, and carries them through all
// copies; the temporary row of a cycle is in its registers. No thread reads what another one
// writes, so that nothing has to wait between copies.
#pragma once

#include "kv_cache/reorder_launch.h"
#include "kv_cache/thread_block_row_copies.cuh"

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
  unsigned char* column[kUnits];  // null: behind the last one
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
