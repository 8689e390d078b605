// The CUDA kernel of top_k_top_p_sample, emulated, against the CPU's: the same bits for every
// layout of the launch and every schedule.
#include <iostream>

#include "check.h"
#include "emulated_sample.h"

namespace lmdecode::sampling::test {
namespace {

int64_t cases_run = 0, launches_run = 0;

bool compare(const SampleCase& c, const SamplingLaunchPlan& plan, uint64_t schedule,
             const SampleResult& expected) {
  ++launches_run;
  std::string what;
  try {
    const SampleResult result = run_emulated(c, plan, schedule);
    if (result == expected) return true;
    what = test::difference(c, expected, result);
  } catch (const std::exception& error) {
    what = error.what();
  }
  std::cout << c.describe() << "\n  cluster " << plan.cluster_size << " threads " << plan.threads
            << " slice " << plan.slice << " cached " << plan.cached << " clusters " << plan.clusters
            << " rank_chunk " << plan.rank_chunk << " schedule " << schedule << what << std::endl;
  return false;
}

void run_cases(uint64_t first_seed, int count, int64_t min_vocab, int64_t max_vocab,
               int schedules) {
  for (int i = 0; i < count; ++i) {
    const uint64_t seed = first_seed + static_cast<uint64_t>(i);
    Random random(seed * 7919 + 1);
    const int64_t vocab = min_vocab + random.below(max_vocab - min_vocab + 1);
    const SampleCase c = random_case(seed, vocab > 2000 ? 2 : 1 + random.below(4), vocab);
    const SampleResult expected = run_cpu(c);
    ++cases_run;
    for (int s = 0; s < schedules; ++s) {
      const uint64_t schedule =
          schedules == 6 ? static_cast<uint64_t>(s) : (seed + static_cast<uint64_t>(s)) % 6;
      const bool same = compare(c, random_plan(random, c), schedule, expected);
      CHECK(same);
      if (!same) return;
    }
  }
}

TEST(small_rows_on_all_schedules) { run_cases(1, 60, 1, 70, 6); }
TEST(small_rows) { run_cases(1000, 400, 1, 70, 2); }
TEST(rows_about_a_power_of_two) { run_cases(2000, 60, 127, 129, 2); }
TEST(rows_of_1000) { run_cases(3000, 60, 1000, 1003, 1); }
TEST(rows_of_5000) { run_cases(4000, 24, 4999, 5003, 1); }
TEST(rows_of_20000) { run_cases(5000, 4, 19997, 20011, 1); }

TEST(more_than_500_cases) {
  std::cout << cases_run << " cases, " << launches_run << " launches" << std::endl;
  CHECK(check::filtered || (cases_run > 500 && launches_run > 1000));
}

// A launch as the host plans it, on a device that would have 132 multiprocessors.
TEST(planned_launches) {
  const SamplingDevice device{132, 227 * 1024, 228 * 1024, 8};
  for (uint64_t seed = 6000; seed < 6006; ++seed) {
    const SampleCase c = random_case(seed, 2, 33000 + static_cast<int64_t>(seed % 7));
    const int element_bytes = c.params.dtype == DType::kFloat32 ? 4 : 2;
    const SamplingLaunchPlan plan = plan_sampling_launch(2, c.params.vocab, element_bytes,
                                                         sizeof(cuda_kernels::RowStorage), device);
    CHECK(plan.cluster_size > 1);
    CHECK(compare(c, plan, seed % 6, run_cpu(c)));
  }
}

}  // namespace
}  // namespace lmdecode::sampling::test

CHECK_MAIN()
