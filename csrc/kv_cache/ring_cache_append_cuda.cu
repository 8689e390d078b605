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
  launch_kernel(
      kOp, &ring_append_cuda::ring_cache_append_kernel,
      {ring_append_blocks(launch, device.multiprocessors), ring_append_cuda_tuning::kThreads},
      stream, launch);
}

}  // namespace lmdecode::kv_cache
