// Launches copy_blocks_: no allocation and no wait, so that a CUDA graph can capture it.
#include "common/cuda_launch.h"
#include "kv_cache/copy_blocks.h"
#include "kv_cache/copy_blocks_kernel.cuh"

namespace lmdecode::kv_cache {

void copy_blocks_cuda(const CopyBlocksParams& params, void* stream) {
  if (params.copy_count == 0) return;
  const CurrentDevice device("copy_blocks_");
  for (int64_t at = 0; at < params.pool_count;) {
    const CopyBlocksLaunch launch = next_copy_blocks_launch(params, &at);
    if (launch.count == 0) continue;
    launch_kernel(
        "copy_blocks_", &copy_blocks_cuda_kernels::copy_blocks_kernel,
        {copy_blocks_grid(launch, device.multiprocessors), copy_blocks_cuda_tuning::kThreads},
        stream, launch);
  }
}

}  // namespace lmdecode::kv_cache
