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
  const int code_version = prepare_kernel(op, kernel, device);
  SamplingDevice limits;
  limits.multiprocessors = device.multiprocessors;
  limits.shared_bytes_per_block = device.shared_limit;
  limits.shared_bytes_per_multiprocessor = device.shared_of_multiprocessor;
  // Clusters are a matter of the code that was compiled as much as of the device: PTX for sm_80
  // knows none, wherever it runs.
  if (code_version >= 90 && device.has_clusters) {
    limits.max_cluster_size = cuda_tuning::kMaxClusterSize;
  }
  const SamplingLaunchPlan plan =
      plan_sampling_launch(rows, vocab, element_bytes, sizeof(cuda_kernels::RowStorage), limits);
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
