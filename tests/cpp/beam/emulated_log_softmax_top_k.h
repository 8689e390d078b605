// log_softmax_top_k on the CPU and its CUDA kernels, emulated, on the same calls.
#pragma once

#include <cstdlib>
#include <memory>

#include "beam/log_softmax_top_k.h"
#include "beam/processor_edits.h"
#include "beam/trie_kernel.cuh"
#include "processor_case.h"
#include "sampling/sampling_workspace.h"

namespace lmdecode::beam::test {

// processors: null where there are none.
inline BeamResult run_cpu(const BeamCase& c, const ProcessorCase* processors) {
  BeamResult result(c.params);
  const LogSoftmaxTopKParams params = c.params_into(result);
  const int64_t size = c.most_beams() * params.row_candidates;
  size_t bytes = sampling::sampling_workspace_bytes(std::max(size, params.vocab));
  if (processors != nullptr) bytes += TokenEdits::bytes(processors->max_edits, params.vocab);
  const std::unique_ptr<void, void (*)(void*)> workspace(
      std::aligned_alloc(64, (bytes + 63) / 64 * 64), std::free);
  if (processors == nullptr) {
    default_::beam::log_softmax_top_k_rows(params, 0, params.rows, workspace.get());
  } else {
    default_::beam::log_softmax_top_k_processed_rows(
        params, processors->processors, processors->max_edits, 0, params.rows, workspace.get());
  }
  default_::beam::log_softmax_top_k_requests(params, 0, params.requests, size, workspace.get());
  return result;
}

template <class Params>
void launch_rows(void (*kernel)(Params, sampling::SamplingLaunchPlan), const Params& params,
                 const sampling::SamplingLaunchPlan& plan, uint64_t schedule) {
  emulation::launch(kernel, dim3(static_cast<unsigned>(plan.clusters * plan.cluster_size)),
                    dim3(static_cast<unsigned>(plan.threads)),
                    static_cast<unsigned>(plan.cluster_size), plan.shared_bytes, schedule, params,
                    plan);
}

struct Layout {
  sampling::SamplingLaunchPlan plan;
  sampling::SamplingLaunchPlan processed_plan;  // of rows of f32
  int merge_blocks, merge_threads;
};

template <class T>
void launch_rows(const LogSoftmaxTopKParams& params, const ProcessorCase* processors,
                 const Layout& layout, uint64_t schedule) {
  if (processors == nullptr) {
    return launch_rows(&cuda_kernels::log_softmax_top_k_row_kernel<T>, params, layout.plan,
                       schedule);
  }
  const Buffer<float> values(params.rows * params.vocab);
  const ProcessedParams all{params, processors->processors, values.data()};
  if (all.processors.tries.value.tokens != nullptr) {
    launch_rows(&cuda_kernels::trie_processor_row_kernel<T>, all, layout.plan, schedule);
    return launch_rows(&cuda_kernels::trie_row_kernel, all, layout.processed_plan, schedule);
  }
  launch_rows(&cuda_kernels::processor_row_kernel<T>, all, layout.plan, schedule);
  launch_rows(&cuda_kernels::processed_row_kernel, all, layout.processed_plan, schedule);
}

inline BeamResult run_emulated(const BeamCase& c, const ProcessorCase* processors,
                               const Layout& layout, uint64_t schedule) {
  BeamResult result(c.params);
  const LogSoftmaxTopKParams params = c.params_into(result);
  switch (params.dtype) {
    case DType::kFloat32:
      launch_rows<float>(params, processors, layout, schedule);
      break;
    case DType::kFloat16:
      launch_rows<Half>(params, processors, layout, schedule);
      break;
    case DType::kBFloat16:
      launch_rows<BFloat16>(params, processors, layout, schedule);
      break;
  }
  emulation::launch(cuda_kernels::log_softmax_top_k_request_kernel,
                    dim3(static_cast<unsigned>(layout.merge_blocks)),
                    dim3(static_cast<unsigned>(layout.merge_threads)), 1,
                    sizeof(sampling::cuda_kernels::RowStorage), schedule, params);
  return result;
}

// Layouts that a device would get, and stranger ones: the result must not depend on any.
inline sampling::SamplingLaunchPlan random_plan(Random& random, const LogSoftmaxTopKParams& params,
                                                int element_bytes) {
  const int64_t vocab = params.vocab;
  sampling::SamplingLaunchPlan plan;
  plan.cluster_size = random.any_of({1, 1, 2, 4, 8});
  plan.threads = random.any_of({32, 64, 64, 128});
  plan.slice = (vocab + plan.cluster_size - 1) / plan.cluster_size;
  if (random.chance(0.7)) plan.slice = (plan.slice + 15) / 16 * 16;
  plan.cached = random.chance(0.5)   ? plan.slice
                : random.chance(0.5) ? 0
                                     : random.below(plan.slice + 1);
  plan.list_room = random.any_of({8, 100, sampling::cuda_tuning::kListedLogits});
  plan.clusters = random.chance(0.5) ? params.rows : 1 + random.below(params.rows);
  plan.shared_bytes = sizeof(sampling::cuda_kernels::RowStorage) +
                      sampling::sampling_cache_bytes(plan.cached, element_bytes);
  return plan;
}

inline Layout random_layout(Random& random, const BeamCase& c) {
  Layout layout;
  layout.plan = random_plan(random, c.params, c.params.dtype == DType::kFloat32 ? 4 : 2);
  layout.processed_plan = random_plan(random, c.params, 4);
  layout.merge_blocks = 1 + static_cast<int>(random.below(c.params.requests));
  layout.merge_threads = random.any_of({32, 64, 128});
  return layout;
}

inline std::string describe(const Layout& layout) {
  std::ostringstream text;
  text << "cluster " << layout.plan.cluster_size << " threads " << layout.plan.threads << " slice "
       << layout.plan.slice << " cached " << layout.plan.cached << " clusters "
       << layout.plan.clusters << " merge " << layout.merge_blocks << " x " << layout.merge_threads;
  return text.str();
}

}  // namespace lmdecode::beam::test
