// The CUDA kernels of log_softmax_top_k, emulated, against the CPU's: the same bits for every
// layout of the launch and every schedule.
#include <cstdlib>
#include <iostream>
#include <memory>

#include "beam/log_softmax_top_k_kernel.cuh"
#include "beam/log_softmax_top_k_levels.h"
#include "beam/processor_edits.h"
#include "beam/processor_rows_kernel.cuh"
#include "check.h"
#include "processor_case.h"
#include "sampling/sampling_workspace.h"

namespace lmdecode::beam::test {
namespace {

// processors: null where there are none.
BeamResult run_cpu(const BeamCase& c, const ProcessorCase* processors) {
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
  launch_rows(&cuda_kernels::processor_row_kernel<T>, all, layout.plan, schedule);
  launch_rows(&cuda_kernels::processed_row_kernel, all, layout.processed_plan, schedule);
}

BeamResult run_emulated(const BeamCase& c, const ProcessorCase* processors, const Layout& layout,
                        uint64_t schedule) {
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
sampling::SamplingLaunchPlan random_plan(Random& random, const LogSoftmaxTopKParams& params,
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
  plan.clusters = random.chance(0.5) ? params.rows : 1 + random.below(params.rows);
  plan.shared_bytes = sizeof(sampling::cuda_kernels::RowStorage) +
                      sampling::sampling_cache_bytes(plan.cached, element_bytes);
  return plan;
}

Layout random_layout(Random& random, const BeamCase& c) {
  Layout layout;
  layout.plan = random_plan(random, c.params, c.params.dtype == DType::kFloat32 ? 4 : 2);
  layout.processed_plan = random_plan(random, c.params, 4);
  layout.merge_blocks = 1 + static_cast<int>(random.below(c.params.requests));
  layout.merge_threads = random.any_of({32, 64, 128});
  return layout;
}

int64_t cases_run = 0, launches_run = 0;

void run_cases(uint64_t first_seed, int count, int64_t min_vocab, int64_t max_vocab, int schedules,
               bool with_processors = false) {
  for (int i = 0; i < count; ++i) {
    const uint64_t seed = first_seed + static_cast<uint64_t>(i);
    Random random(seed * 7919 + 1);
    const int64_t vocab = min_vocab + random.below(max_vocab - min_vocab + 1);
    const BeamCase c = random_case(seed, vocab > 2000 ? 1 : 1 + random.below(3), vocab);
    ProcessorCase processor_case;
    if (with_processors) processor_case = random_processors(random, c.params);
    const ProcessorCase* processors = with_processors ? &processor_case : nullptr;
    const BeamResult expected = run_cpu(c, processors);
    ++cases_run;
    for (int s = 0; s < schedules; ++s) {
      const uint64_t schedule =
          schedules == 6 ? static_cast<uint64_t>(s) : (seed + static_cast<uint64_t>(s)) % 6;
      const Layout layout = random_layout(random, c);
      ++launches_run;
      std::string what;
      try {
        const BeamResult result = run_emulated(c, processors, layout, schedule);
        if (result == expected) continue;
        what = difference(c, expected, result);
      } catch (const std::exception& error) {
        what = error.what();
      }
      CHECK(what.empty());
      std::cout << "seed " << seed << " " << c.describe() << "\n  cluster "
                << layout.plan.cluster_size << " threads " << layout.plan.threads << " slice "
                << layout.plan.slice << " cached " << layout.plan.cached << " clusters "
                << layout.plan.clusters << " merge " << layout.merge_blocks << " x "
                << layout.merge_threads << " schedule " << schedule << what << std::endl;
      return;
    }
  }
}

TEST(small_rows_on_all_schedules) { run_cases(1, 40, 1, 70, 6); }
TEST(small_rows) { run_cases(1000, 200, 1, 70, 2); }
TEST(rows_about_a_power_of_two) { run_cases(2000, 30, 127, 129, 2); }
TEST(rows_of_1000) { run_cases(3000, 20, 1000, 1003, 1); }
TEST(rows_of_5000) { run_cases(4000, 6, 4999, 5003, 1); }

TEST(processors_on_all_schedules) { run_cases(5000, 40, 1, 70, 6, true); }
TEST(processors_on_small_rows) { run_cases(6000, 200, 1, 70, 2, true); }
TEST(processors_on_rows_of_1000) { run_cases(7000, 20, 1000, 1003, 1, true); }
TEST(processors_on_rows_of_5000) { run_cases(8000, 6, 4999, 5003, 1, true); }

TEST(more_than_200_cases) {
  std::cout << cases_run << " cases, " << launches_run << " launches" << std::endl;
  CHECK(cases_run > 200);
}

}  // namespace
}  // namespace lmdecode::beam::test

CHECK_MAIN()
