// Launches reorder_cache_: no allocation and no wait, so that a CUDA graph can capture it.
#include <sstream>
#include <stdexcept>
#include <string>

#include "kv_cache/reorder_cache.h"
#include "kv_cache/reorder_cache_kernel.cuh"

namespace lmdecode {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // the next call must not find it again
  throw std::runtime_error(std::string("reorder_cache_: ") + what + ": " +
                           cudaGetErrorString(error));
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

}  // namespace

void reorder_cache_cuda(const ReorderCacheParams& params, void* stream) {
  const auto kernel = &reorder_cuda::reorder_cache_kernel;
  const int64_t rows = params.parents.rows;
  if (rows <= 1) return;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const int shared_limit = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const int multiprocessors = attribute(cudaDevAttrMultiProcessorCount, device);
  if (rows > max_reorder_rows(shared_limit)) {
    std::ostringstream message;
    message << "reorder_cache_: parents has shape [" << rows << "]; expected at most "
            << max_reorder_rows(shared_limit) << " rows on this device";
    throw std::invalid_argument(message.str());
  }
  // The attribute belongs to the kernel, not to the launch: the device's limit, so that another
  // thread's launch is not held to less than it needs.
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_limit),
        "cudaFuncSetAttribute");
  for (int64_t at = 0; at < params.count;) {
    const ReorderLaunch launch = next_reorder_launch(params, &at);
    if (launch.count == 0) continue;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(reorder_blocks(launch, multiprocessors)));
    config.blockDim = dim3(reorder_cuda_tuning::kThreads);
    config.dynamicSmemBytes = reorder_shared_bytes(rows);
    config.stream = static_cast<cudaStream_t>(stream);
    check(cudaLaunchKernelEx(&config, kernel, launch), "launch");
  }
}

}  // namespace lmdecode
