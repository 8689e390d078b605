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
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(copy_blocks_grid(launch, device.multiprocessors)));
    config.blockDim = dim3(copy_blocks_cuda_tuning::kThreads);
    config.stream = static_cast<cudaStream_t>(stream);
    const auto kernel = &copy_blocks_cuda_kernels::copy_blocks_kernel;
    check_cuda("copy_blocks_", cudaLaunchKernelEx(&config, kernel, launch), "launch");
  }
}

}  // namespace lmdecode::kv_cache
