// update_beam_indirection_ on a GPU, in place. docs/reference/kv_cache.md has the semantics.
//
// As in reorder_cache_kernel.cuh each block finds the order of the copies; a thread owns positions,
// and carries each through all copies of rows, so that nothing has to wait between them.
#pragma once

#include "kv_cache/block_row_copies.cuh"
#include "kv_cache/update_beam_indirection_launch.h"

namespace lmdecode::kv_cache::beam_indirection_cuda {

__global__ void __launch_bounds__(beam_indirection_cuda_tuning::kThreads)
    update_beam_indirection_kernel(const BeamIndirectionParams params, const int64_t positions) {
  constexpr int32_t kStays = -1;  // in place of a length
  BeamIndirectionStorage& storage = cuda::shared_storage<BeamIndirectionStorage>();
  const int32_t rows = params.parents.rows;
  const RowPlan plan(&storage + 1, rows);
  int32_t* const lengths = plan.readers + rows;
  const bool moves = find_row_copies(plan, rows, &storage.copy_count, [&](int32_t row) {
    const int64_t parent = params.parents.at(row);
    const int64_t length = params.lengths.at(row);
    const bool valid = params.parents.contains(parent) && length >= 0 && length <= params.capacity;
    lengths[row] = valid ? static_cast<int32_t>(length) : kStays;
    return valid ? static_cast<int32_t>(parent) : row;
  });
  const int32_t copy_count = moves ? storage.copy_count : 0;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t position = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       position < positions; position += threads) {
    int32_t* const column = params.table + position;
    int32_t temporary = 0;
    for (int32_t i = 0; i < copy_count; ++i) {
      const RowCopy copy = plan.copies[i];
      if (copy.to == kTemporaryRow) {
        temporary = column[copy.from * params.row_stride];
      } else if (position < lengths[copy.to]) {
        column[copy.to * params.row_stride] =
            copy.from == kTemporaryRow ? temporary : column[copy.from * params.row_stride];
      }
    }
    for (int32_t row = 0; row < rows; ++row) {
      if (position == lengths[row]) column[row * params.row_stride] = row;
    }
  }
}

}  // namespace lmdecode::kv_cache::beam_indirection_cuda
