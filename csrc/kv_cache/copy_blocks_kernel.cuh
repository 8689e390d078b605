// copy_blocks_ on a GPU. No copy reads what another one writes, so that nothing has to wait.
#pragma once

#include <cstdint>

#include "common/cuda_intrinsics.cuh"
#include "kv_cache/copy_blocks.h"

// How copy_blocks_ is laid out on a device: pure arithmetic, no CUDA call.

namespace lmdecode::kv_cache {

namespace copy_blocks_cuda_tuning {

// These change speed, never a result.
constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 8;

}  // namespace copy_blocks_cuda_tuning

// Pools of one launch: their descriptions are kernel parameters, of which there are 4 KB.
constexpr int kPoolsPerLaunch = 32;

// A CUDA block takes items b, b + blocks, ...: one head of one copy in one pool each.
struct CopyBlocksLaunch {
  BlockPool pools[kPoolsPerLaunch];
  int32_t unit_bytes[kPoolsPerLaunch] = {};      // 1, 2, 4, 8 or 16: what a thread copies at once
  int64_t first_item[kPoolsPerLaunch + 1] = {};  // by pool; the last: the total
  const BlockCopy* copies = nullptr;             // [copy_count]
  int32_t count = 0;
};
static_assert(sizeof(CopyBlocksLaunch) <= 4096);

// The launch of the next pools from *at on; advances *at past them. Skips empty pools.
inline CopyBlocksLaunch next_copy_blocks_launch(const CopyBlocksParams& params, int64_t* at) {
  CopyBlocksLaunch launch;
  launch.copies = params.copies;
  for (; *at < params.pool_count && launch.count < kPoolsPerLaunch; ++*at) {
    const BlockPool& pool = params.pools[*at];
    const int64_t items = params.copy_count * pool.heads;
    if (items == 0 || pool.vector_bytes == 0) continue;
    const int64_t bits = reinterpret_cast<intptr_t>(pool.data) | pool.block_stride |
                         pool.head_stride | pool.position_stride | pool.vector_bytes | 16;
    const int32_t i = launch.count++;
    launch.pools[i] = pool;
    launch.unit_bytes[i] = static_cast<int32_t>(bits & -bits);
    launch.first_item[i + 1] = launch.first_item[i] + items;
  }
  return launch;
}

inline int64_t copy_blocks_grid(const CopyBlocksLaunch& launch, int multiprocessors) {
  const int64_t items = launch.first_item[launch.count];
  const int64_t most =
      static_cast<int64_t>(multiprocessors) * copy_blocks_cuda_tuning::kBlocksPerMultiprocessor;
  return items < most ? items : most;
}

}  // namespace lmdecode::kv_cache

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
