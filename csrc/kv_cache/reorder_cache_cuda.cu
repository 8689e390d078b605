// Launches reorder_cache_: no allocation and no wait, so that a CUDA graph can capture it.
#include <sstream>
#include <stdexcept>

#include "common/cuda_launch.h"
#include "kv_cache/reorder_cache.h"
#include "kv_cache/reorder_cache_kernel.cuh"

namespace lmdecode::kv_cache {

void reorder_cache_cuda(const ReorderCacheParams& params, void* stream) {
  constexpr const char* kOp = "reorder_cache_";
  const auto kernel = &reorder_cuda::reorder_cache_kernel;
  const int64_t rows = params.parents.rows;
  if (rows <= 1) return;
  const CurrentDevice device(kOp);
  if (rows > max_reorder_rows(device.shared_limit)) {
    std::ostringstream message;
    message << kOp << ": parents has shape [" << rows << "]; expected at most "
            << max_reorder_rows(device.shared_limit) << " rows on this device";
    throw std::invalid_argument(message.str());
  }
  prepare_kernel(kOp, kernel, device);
  for (int64_t at = 0; at < params.count;) {
    const ReorderLaunch launch = next_reorder_launch(params, &at);
    if (launch.count == 0) continue;
    launch_kernel(kOp, kernel,
                  {reorder_blocks(launch, device.multiprocessors), reorder_cuda_tuning::kThreads,
                   reorder_shared_bytes(rows)},
                  stream, launch);
  }
}

}  // namespace lmdecode::kv_cache
