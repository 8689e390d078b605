// The CPU kernels of top_k_top_p_sample at every level: the same bits, on exact memory.
#include <cstdlib>
#include <iostream>
#include <memory>

#include "check.h"
#include "sample_case.h"
#include "sampling/sampling_workspace.h"
#include "sampling/top_k_top_p_sample.h"
#include "simd/cpu_capability.h"

namespace lmdecode::sampling::test {
namespace {

using Rows = void (*)(const TopKTopPSampleParams&, int64_t, int64_t, void*);

SampleResult run(Rows rows, const SampleCase& c, int64_t first_part) {
  SampleResult result = c.make_result();
  const TopKTopPSampleParams params = c.params_into(result);
  const size_t bytes = sampling_workspace_bytes(c.params.vocab);
  void* workspace = nullptr;
  if (posix_memalign(&workspace, 64, bytes) != 0) throw std::bad_alloc();
  const std::unique_ptr<void, void (*)(void*)> owner(workspace, std::free);
  rows(params, 0, first_part, workspace);
  rows(params, first_part, params.batch, workspace);
  return result;
}

int64_t cases_run = 0;

void run_cases(uint64_t first_seed, int count, int64_t min_vocab, int64_t max_vocab) {
#if defined(LMD_HAS_AVX512)
  const CpuCapability best = max_cpu_capability();
#endif
  for (int i = 0; i < count; ++i) {
    const uint64_t seed = first_seed + static_cast<uint64_t>(i);
    Random random(seed * 104729 + 1);
    const int64_t vocab = min_vocab + random.below(max_vocab - min_vocab + 1);
    const SampleCase c = random_case(seed, 1 + random.below(4), vocab);
    const SampleResult expected = run(&default_::sampling::top_k_top_p_sample_rows, c, 0);
    ++cases_run;
    const auto same = [&](const char* level, Rows rows) {
      const SampleResult result = run(rows, c, random.below(c.params.batch + 1));
      const bool equal = result == expected;
      CHECK(equal);
      if (!equal)
        std::cout << level << ": " << c.describe() << difference(c, expected, result) << std::endl;
      return equal;
    };
    if (!same("default in two parts", &default_::sampling::top_k_top_p_sample_rows)) return;
#if defined(LMD_HAS_AVX512)
    if (best >= CpuCapability::kAvx2 && !same("avx2", &avx2::sampling::top_k_top_p_sample_rows))
      return;
    if (best >= CpuCapability::kAvx512 &&
        !same("avx512", &avx512::sampling::top_k_top_p_sample_rows))
      return;
#endif
  }
}

TEST(small_rows) { run_cases(1, 3000, 1, 70); }
TEST(rows_about_a_power_of_two) { run_cases(10000, 400, 126, 130); }
TEST(rows_of_1000) { run_cases(20000, 300, 990, 1030); }
TEST(rows_of_5000) { run_cases(30000, 200, 4090, 5003); }
TEST(rows_of_20000) { run_cases(40000, 60, 19997, 20011); }
TEST(rows_of_140000) { run_cases(50000, 6, 139990, 140003); }

TEST(more_than_3900_cases) {
  std::cout << cases_run << " cases up to level " << cpu_capability_name(max_cpu_capability())
            << std::endl;
  CHECK(check::filtered || cases_run > 3900);
}

}  // namespace
}  // namespace lmdecode::sampling::test

CHECK_MAIN()
