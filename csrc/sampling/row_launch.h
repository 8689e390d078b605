// Launches a kernel that gives each row a thread block cluster (row_cluster.cuh): no allocation and
// no wait, so that a CUDA graph can capture it. For .cu files.
#pragma once

#include <stdexcept>
#include <string>

#include "sampling/row_cluster.cuh"
#include "sampling/sampling_launch_plan.h"

namespace lmdecode {

inline void check_cuda(const char* op, cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // the next call must not find it again
  throw std::runtime_error(std::string(op) + ": " + what + ": " + cudaGetErrorString(error));
}

inline int device_attribute(const char* op, cudaDeviceAttr which, int device) {
  int value = 0;
  check_cuda(op, cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

// kernel(params, plan) on `rows` rows of `vocab` elements.
template <class Params>
void launch_rows(const char* op, void (*kernel)(Params, SamplingLaunchPlan), int64_t rows,
                 int64_t vocab, int element_bytes, const Params& params, cudaStream_t stream) {
  int device = 0;
  check_cuda(op, cudaGetDevice(&device), "cudaGetDevice");
  cudaFuncAttributes code;
  check_cuda(op, cudaFuncGetAttributes(&code, kernel), "cudaFuncGetAttributes");
  SamplingDevice limits;
  limits.multiprocessors = device_attribute(op, cudaDevAttrMultiProcessorCount, device);
  limits.shared_bytes_per_block =
      device_attribute(op, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  limits.shared_bytes_per_multiprocessor =
      device_attribute(op, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  // Clusters are a matter of the code that was compiled as much as of the device: PTX for sm_80
  // knows none, wherever it runs.
  if (code.ptxVersion >= 90 && device_attribute(op, cudaDevAttrClusterLaunch, device) != 0) {
    limits.max_cluster_size = sampling_cuda_tuning::kMaxClusterSize;
  }
  const SamplingLaunchPlan plan =
      plan_sampling_launch(rows, vocab, element_bytes, sizeof(sampling_cuda::RowStorage), limits);
  // The attribute belongs to the kernel, not to the launch: the device's limit, whatever this plan
  // takes, so that another thread's launch is not held to less than it needs.
  check_cuda(op,
             cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(limits.shared_bytes_per_block)),
             "cudaFuncSetAttribute");

  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(plan.clusters * plan.cluster_size));
  config.blockDim = dim3(static_cast<unsigned>(plan.threads));
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(plan.cluster_size);
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  if (plan.cluster_size > 1) {
    config.attrs = &cluster;
    config.numAttrs = 1;
  }
  check_cuda(op, cudaLaunchKernelEx(&config, kernel, params, plan), "launch");
  check_cuda(op, cudaGetLastError(), "launch");
}

}  // namespace lmdecode
