// Runs top_k_top_p_sample on the CPU and, emulated, its CUDA kernel.
#pragma once

#include <cstdlib>
#include <memory>

#include "sample_case.h"
#include "sampling/sampling_workspace.h"
#include "sampling/top_k_top_p_sample.h"
#include "sampling/top_k_top_p_sample_kernel.cuh"

namespace lmdecode::sampling::test {

inline SampleResult run_cpu(const SampleCase& c) {
  SampleResult result = c.make_result();
  const size_t bytes = (sampling_workspace_bytes(c.params.vocab) + 63) / 64 * 64;
  std::unique_ptr<void, void (*)(void*)> workspace(std::aligned_alloc(64, bytes), std::free);
  default_::sampling::top_k_top_p_sample_rows(c.params_into(result), 0, c.params.batch,
                                              workspace.get());
  return result;
}

template <class T>
void launch(const TopKTopPSampleParams& params, const SamplingLaunchPlan& plan, uint64_t schedule) {
  emulation::launch(cuda_kernels::top_k_top_p_sample_kernel<T>,
                    dim3(static_cast<unsigned>(plan.clusters * plan.cluster_size)),
                    dim3(static_cast<unsigned>(plan.threads)),
                    static_cast<unsigned>(plan.cluster_size), plan.shared_bytes, schedule, params,
                    plan);
}

inline SampleResult run_emulated(const SampleCase& c, const SamplingLaunchPlan& plan,
                                 uint64_t schedule) {
  SampleResult result = c.make_result();
  const TopKTopPSampleParams params = c.params_into(result);
  switch (params.dtype) {
    case DType::kFloat32:
      launch<float>(params, plan, schedule);
      break;
    case DType::kFloat16:
      launch<Half>(params, plan, schedule);
      break;
    case DType::kBFloat16:
      launch<BFloat16>(params, plan, schedule);
      break;
  }
  return result;
}

// Layouts that a device would get, and stranger ones: the result must not depend on any.
inline SamplingLaunchPlan random_plan(Random& random, const SampleCase& c) {
  const int64_t vocab = c.params.vocab;
  SamplingLaunchPlan plan;
  plan.cluster_size = random.any_of({1, 1, 2, 4, 4, 8});
  plan.threads = random.any_of({32, 64, 64, 128});
  plan.slice = (vocab + plan.cluster_size - 1) / plan.cluster_size;
  if (random.chance(0.7)) plan.slice = (plan.slice + 15) / 16 * 16;
  plan.cached = random.chance(0.5)   ? plan.slice
                : random.chance(0.5) ? 0
                                     : random.below(plan.slice + 1);
  plan.clusters = random.chance(0.5) ? c.params.batch : 1 + random.below(c.params.batch);
  plan.list_room = random.any_of({8, 100, cuda_tuning::kListedLogits});
  plan.rank_chunk = random.any_of({4, 32, cuda_tuning::kRankChunk});
  const int element_bytes = c.params.dtype == DType::kFloat32 ? 4 : 2;
  plan.shared_bytes =
      sizeof(cuda_kernels::RowStorage) + sampling_cache_bytes(plan.cached, element_bytes);
  return plan;
}

}  // namespace lmdecode::sampling::test
