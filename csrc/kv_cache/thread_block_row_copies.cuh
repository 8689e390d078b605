// The order of the copies of a parent map, found by a block in its shared memory.
#pragma once

#include "common/cuda_intrinsics.cuh"
#include "common/row_copies.h"

namespace lmdecode::kv_cache {

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

// Called by all threads of a block. parent_of(row): its parent, in range. Returns, to all of them,
// whether a row moves; only then are the copies there, *copy_count of them (in shared memory too),
// and seen by every thread.
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
