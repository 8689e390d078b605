// Launches a kernel that gives each row a thread block cluster (row_cluster.cuh): no allocation and
// no wait, so that a CUDA graph can capture it. For .cu files.
#pragma once

#include "common/cuda_launch.h"
#include "sampling/row_cluster.cuh"
#include "sampling/sampling_launch_plan.h"

namespace lmdecode::sampling {

// kernel(params, plan) on `rows` rows of `vocab` elements.
template <class Params>
void launch_rows(const char* op, void (*kernel)(Params, SamplingLaunchPlan), int64_t rows,
                 int64_t vocab, int element_bytes, const Params& params, cudaStream_t stream) {
  const CurrentDevice device(op);
  cudaFuncAttributes code;
  check_cuda(op, cudaFuncGetAttributes(&code, kernel), "cudaFuncGetAttributes");
  SamplingDevice limits;
  limits.multiprocessors = device.multiprocessors;
  limits.shared_bytes_per_block = device.shared_limit;
  limits.shared_bytes_per_multiprocessor =
      device_attribute(op, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device.index);
  // Clusters are a matter of the code that was compiled as much as of the device: PTX for sm_80
  // knows none, wherever it runs.
  if (code.ptxVersion >= 90 && device_attribute(op, cudaDevAttrClusterLaunch, device.index) != 0) {
    limits.max_cluster_size = cuda_tuning::kMaxClusterSize;
  }
  const SamplingLaunchPlan plan =
      plan_sampling_launch(rows, vocab, element_bytes, sizeof(cuda_kernels::RowStorage), limits);
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

}  // namespace lmdecode::sampling
