// The CUDA kernels of log_softmax_top_k, emulated, against the CPU's: the same bits for every
// layout of the launch and every schedule.
#include <cstdlib>
#include <iostream>
#include <memory>

#include "beam/log_softmax_top_k_kernel.cuh"
#include "beam_case.h"
#include "check.h"
#include "sampling/sampling_workspace.h"

namespace lmdecode {

namespace default_ {
void log_softmax_top_k_rows(const LogSoftmaxTopKParams& params, int64_t begin, int64_t end,
                            void* workspace);
void log_softmax_top_k_requests(const LogSoftmaxTopKParams& params, int64_t begin, int64_t end,
                                int64_t size, void* workspace);
}  // namespace default_

namespace beam_test {
namespace {

BeamResult run_cpu(const BeamCase& c) {
  BeamResult result(c.params);
  const LogSoftmaxTopKParams params = c.params_into(result);
  const int64_t size = c.most_beams() * params.row_candidates;
  const size_t bytes = sampling_workspace_bytes(std::max(size, params.vocab));
  const std::unique_ptr<void, void (*)(void*)> workspace(
      std::aligned_alloc(64, (bytes + 63) / 64 * 64), std::free);
  default_::log_softmax_top_k_rows(params, 0, params.rows, workspace.get());
  default_::log_softmax_top_k_requests(params, 0, params.requests, size, workspace.get());
  return result;
}

template <class T>
void launch_rows(const LogSoftmaxTopKParams& params, const SamplingLaunchPlan& plan,
                 uint64_t schedule) {
  emulation::launch(beam_cuda::log_softmax_top_k_row_kernel<T>,
                    dim3(static_cast<unsigned>(plan.clusters * plan.cluster_size)),
                    dim3(static_cast<unsigned>(plan.threads)),
                    static_cast<unsigned>(plan.cluster_size), plan.shared_bytes, schedule, params,
                    plan);
}

struct Layout {
  SamplingLaunchPlan plan;
  int merge_blocks, merge_threads;
};

BeamResult run_emulated(const BeamCase& c, const Layout& layout, uint64_t schedule) {
  BeamResult result(c.params);
  const LogSoftmaxTopKParams params = c.params_into(result);
  switch (params.dtype) {
    case DType::kFloat32:
      launch_rows<float>(params, layout.plan, schedule);
      break;
    case DType::kFloat16:
      launch_rows<Half>(params, layout.plan, schedule);
      break;
    case DType::kBFloat16:
      launch_rows<BFloat16>(params, layout.plan, schedule);
      break;
  }
  emulation::launch(beam_cuda::log_softmax_top_k_request_kernel,
                    dim3(static_cast<unsigned>(layout.merge_blocks)),
                    dim3(static_cast<unsigned>(layout.merge_threads)), 1,
                    sizeof(sampling_cuda::RowStorage), schedule, params);
  return result;
}

// Layouts that a device would get, and stranger ones: the result must not depend on any.
Layout random_layout(Random& random, const BeamCase& c) {
  const int64_t vocab = c.params.vocab;
  Layout layout;
  SamplingLaunchPlan& plan = layout.plan;
  plan.cluster_size = random.any_of({1, 1, 2, 4, 8});
  plan.threads = random.any_of({32, 64, 64, 128});
  plan.slice = (vocab + plan.cluster_size - 1) / plan.cluster_size;
  if (random.chance(0.7)) plan.slice = (plan.slice + 15) / 16 * 16;
  plan.cached = random.chance(0.5)   ? plan.slice
                : random.chance(0.5) ? 0
                                     : random.below(plan.slice + 1);
  plan.clusters = random.chance(0.5) ? c.params.rows : 1 + random.below(c.params.rows);
  plan.shared_bytes = sizeof(sampling_cuda::RowStorage) +
                      sampling_cache_bytes(plan.cached, c.params.dtype == DType::kFloat32 ? 4 : 2);
  layout.merge_blocks = 1 + static_cast<int>(random.below(c.params.requests));
  layout.merge_threads = random.any_of({32, 64, 128});
  return layout;
}

int64_t cases_run = 0, launches_run = 0;

void run_cases(uint64_t first_seed, int count, int64_t min_vocab, int64_t max_vocab,
               int schedules) {
  for (int i = 0; i < count; ++i) {
    const uint64_t seed = first_seed + static_cast<uint64_t>(i);
    Random random(seed * 7919 + 1);
    const int64_t vocab = min_vocab + random.below(max_vocab - min_vocab + 1);
    const BeamCase c = random_case(seed, vocab > 2000 ? 1 : 1 + random.below(3), vocab);
    const BeamResult expected = run_cpu(c);
    ++cases_run;
    for (int s = 0; s < schedules; ++s) {
      const uint64_t schedule =
          schedules == 6 ? static_cast<uint64_t>(s) : (seed + static_cast<uint64_t>(s)) % 6;
      const Layout layout = random_layout(random, c);
      ++launches_run;
      std::string what;
      try {
        const BeamResult result = run_emulated(c, layout, schedule);
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

TEST(more_than_200_cases) {
  std::cout << cases_run << " cases, " << launches_run << " launches" << std::endl;
}

}  // namespace
}  // namespace beam_test
}  // namespace lmdecode

CHECK_MAIN()
