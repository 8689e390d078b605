// How copy_blocks_ is laid out on a device: pure arithmetic, no CUDA call.
#pragma once

#include <cstdint>

#include "kv_cache/copy_blocks.h"

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
  int64_t first_item[kPoolsPerLaunch + 1] = {};  // of each pool; the last: of all
  const BlockCopy* copies = nullptr;             // [copy_count]
  int32_t count = 0;
};
static_assert(sizeof(CopyBlocksLaunch) <= 4096);

// The next pools of the call, from *at on, which is set behind them; empty ones are left out.
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
