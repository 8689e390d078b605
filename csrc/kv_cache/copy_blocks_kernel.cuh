// copy_blocks_ on a GPU. No copy reads what another one writes, so that nothing has to wait.
#pragma once

#include "common/cuda_intrinsics.cuh"
#include "kv_cache/copy_blocks_launch.h"

namespace lmdecode::kv_cache::copy_blocks_cuda_kernels {

template <class Unit>
__device__ void copy_head(const BlockPool& pool, const BlockCopy& copy, int64_t head) {
  const unsigned char* const from = pool.at(copy.source, head);
  unsigned char* const to = pool.at(copy.target, head);
  const int64_t in_vector = pool.vector_bytes / static_cast<int64_t>(sizeof(Unit));
  for (int64_t unit = threadIdx.x; unit < copy.positions * in_vector; unit += blockDim.x) {
    const int64_t position = unit / in_vector;
    const int64_t offset = position * pool.position_stride +
                           (unit - position * in_vector) * static_cast<int64_t>(sizeof(Unit));
    *reinterpret_cast<Unit*>(to + offset) = *reinterpret_cast<const Unit*>(from + offset);
  }
}

__global__ void __launch_bounds__(copy_blocks_cuda_tuning::kThreads)
    copy_blocks_kernel(const CopyBlocksLaunch launch) {
  int32_t p = 0;
  for (int64_t item = blockIdx.x; item < launch.first_item[launch.count]; item += gridDim.x) {
    while (item >= launch.first_item[p + 1]) ++p;
    const BlockPool& pool = launch.pools[p];
    const int64_t number = (item - launch.first_item[p]) / pool.heads;
    const int64_t head = (item - launch.first_item[p]) - number * pool.heads;
    const BlockCopy copy = launch.copies[number];
    if (!pool.has_block(copy.source) || !pool.has_block(copy.target)) continue;
    if (copy.positions < 0 || copy.positions > pool.block_size) continue;
    switch (launch.unit_bytes[p]) {
      case 16:
        copy_head<uint4>(pool, copy, head);
        break;
      case 8:
        copy_head<uint2>(pool, copy, head);
        break;
      case 4:
        copy_head<uint32_t>(pool, copy, head);
        break;
      case 2:
        copy_head<uint16_t>(pool, copy, head);
        break;
      default:
        copy_head<uint8_t>(pool, copy, head);
    }
  }
}

}  // namespace lmdecode::kv_cache::copy_blocks_cuda_kernels
