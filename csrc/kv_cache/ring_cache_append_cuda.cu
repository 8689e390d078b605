// Launches ring_cache_append_: no allocation and no wait, so that a CUDA graph can capture it.
#include "common/cuda_launch.h"
#include "kv_cache/ring_cache_append.h"
#include "kv_cache/ring_cache_append_kernel.cuh"

namespace lmdecode::kv_cache {

void ring_cache_append_cuda(const RingCacheAppendParams& params, void* stream) {
  constexpr const char* kOp = "ring_cache_append_";
  const RingAppendLaunch launch = ring_append_launch(params);
  if (ring_append_units(launch) == 0) return;
  const CurrentDevice device(kOp);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(ring_append_blocks(launch, device.multiprocessors)));
  config.blockDim = dim3(ring_append_cuda_tuning::kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  check_cuda(kOp, cudaLaunchKernelEx(&config, &ring_append_cuda::ring_cache_append_kernel, launch),
             "launch");
}

}  // namespace lmdecode::kv_cache
