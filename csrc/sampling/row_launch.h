// Launches a kernel that gives each row a thread block cluster (row_cluster.cuh). For .cu files.
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
  SamplingDevice limits;
  limits.multiprocessors = device.multiprocessors;
  limits.shared_bytes_per_block = device.shared_limit;
  limits.shared_bytes_per_multiprocessor = device.shared_of_multiprocessor;
  limits.max_cluster_size = prepare_kernel(op, kernel, device);
  const SamplingLaunchPlan plan =
      plan_sampling_launch(rows, vocab, element_bytes, sizeof(cuda_kernels::RowStorage), limits);
  launch_kernel(op, kernel,
                {plan.clusters * plan.cluster_size, static_cast<int>(plan.threads),
                 plan.shared_bytes, static_cast<int>(plan.cluster_size)},
                stream, params, plan);
}

}  // namespace lmdecode::sampling
