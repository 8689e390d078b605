// The emulated CUDA kernels of beam_step and beam_finalize against the CPU's bits.
#include <iostream>

#include "beam/beam_finalize_cpu.h"
#include "beam/beam_finalize_kernel.cuh"
#include "beam/beam_step_cpu.h"
#include "beam/beam_step_kernel.cuh"
#include "beam_search_case.h"
#include "check.h"

namespace lmdecode::beam::test {
namespace {

int64_t launches_run = 0;

template <class Params>
void launch(void (*kernel)(Params), const Params& params, size_t shared_bytes, Random& random,
            uint64_t schedule) {
  const dim3 blocks(static_cast<unsigned>(1 + random.below(params.requests)));
  const dim3 threads(static_cast<unsigned>(random.any_of({32, 64, 128})));
  emulation::launch(kernel, blocks, threads, 1, shared_bytes, schedule, params);
  ++launches_run;
}

// "" where the kernel does what the CPU does, or what went wrong.
std::string step(SearchCase& c, const StateMemory& cpu, const StateMemory& cuda,
                 uint64_t schedule) {
  StepResult expected(c), result(c);
  const BeamStepParams params = expected.into(c.step_params(cpu));
  std::vector<int64_t> scratch(BeamStepScratch::bytes(params.state) / 8 + 1);
  beam_step_requests(params, 0, params.requests, scratch.data());
  try {
    launch(&cuda_kernels::beam_step_kernel, result.into(c.step_params(cuda)),
           cuda_kernels::beam_step_shared_bytes(params.state.beams, params.state.hypotheses),
           c.random, schedule);
  } catch (const std::exception& error) {
    return error.what();
  }
  return result == expected ? cuda == cpu ? "" : "another state" : "another result";
}

std::string finalize(SearchCase& c, const StateMemory& cpu, const StateMemory& cuda,
                     uint64_t schedule) {
  const int64_t results = 1 + c.random.below(10);
  const bool add_open = c.random.chance(0.6);
  const BeamFinalizeParams params = c.finalize_params(cpu, results, add_open);
  FinalResult expected(params), result(params);
  std::vector<int32_t> scratch(beam_finalize_scratch_bytes(params) / 4);
  for (int64_t request = 0; request < params.requests; ++request) {
    beam_finalize_request(expected.into(params), request, scratch.data());
  }
  try {
    launch(&cuda_kernels::beam_finalize_kernel,
           result.into(c.finalize_params(cuda, results, add_open)),
           cuda_kernels::beam_finalize_shared_bytes(params), c.random, schedule);
  } catch (const std::exception& error) {
    return error.what();
  }
  return result == expected ? cuda == cpu ? "" : "another state" : "another result";
}

#if !defined(LMD_PLANT_MISSING_BARRIER)

void run_cases(uint64_t first_seed, int count, bool wild) {
  for (int i = 0; i < count; ++i) {
    const uint64_t seed = first_seed + static_cast<uint64_t>(i);
    SearchCase c(seed, wild);
    const StateMemory cuda = c.memory.copy();
    for (uint64_t s = 0; s < 6 && c.has_room(); ++s) {
      const std::string wrong = step(c, c.memory, cuda, (seed + s) % 6);
      if (!wrong.empty()) std::cout << "seed " << seed << " step " << s << ": " << wrong << "\n";
      CHECK(wrong.empty());
      if (!wrong.empty()) return;
      c.new_candidates();
    }
    const std::string wrong = finalize(c, c.memory, cuda, seed % 6);
    if (!wrong.empty()) std::cout << "seed " << seed << " final: " << wrong << std::endl;
    CHECK(wrong.empty());
    if (!wrong.empty()) return;
  }
}

TEST(random_searches) { run_cases(1, 400, false); }
TEST(whatever_the_tensors_hold) { run_cases(5000, 400, true); }

TEST(all_schedules) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    for (uint64_t schedule = 0; schedule < 6; ++schedule) {
      SearchCase c(seed + 9000, false);
      const StateMemory cuda = c.memory.copy();
      if (c.has_room()) CHECK_EQ(step(c, c.memory, cuda, schedule), "");
      CHECK_EQ(finalize(c, c.memory, cuda, schedule), "");
    }
  }
}

#if !defined(LMD_RACE_BUILD)
// Requests of one slot: the result is none to rely on, but nothing outside is touched.
TEST(conflicts_stay_within_the_tensors) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SearchCase c(seed, seed % 2 == 0, true);
    const StateMemory cuda = c.memory.copy();
    for (uint64_t s = 0; s < 6; ++s) {
      step(c, c.memory, cuda, s);
      c.new_candidates();
    }
    finalize(c, c.memory, cuda, seed % 6);
  }
}
#endif

TEST(launches) { std::cout << launches_run << " launches" << std::endl; }

#else

TEST(planted_fault_is_noticed_in_a_step) {
  int noticed = 0;
  for (uint64_t schedule = 0; schedule < 6; ++schedule) {
    SearchCase c(schedule, false);
    const StateMemory cuda = c.memory.copy();
    noticed += !step(c, c.memory, cuda, schedule).empty();
  }
  CHECK(noticed > 0);
}

TEST(planted_fault_is_noticed_in_finalize) {
  int noticed = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    SearchCase c(seed, false);
    for (int s = 0; s < 3 && c.has_room(); ++s) {
      StepResult result(c);
      const BeamStepParams params = result.into(c.step_params(c.memory));
      std::vector<int64_t> scratch(BeamStepScratch::bytes(params.state) / 8 + 1);
      beam_step_requests(params, 0, params.requests, scratch.data());
      c.new_candidates();
    }
    const StateMemory cuda = c.memory.copy();
    noticed += !finalize(c, c.memory, cuda, seed % 6).empty();
  }
  CHECK(noticed > 0);
}

#endif

}  // namespace
}  // namespace lmdecode::beam::test

CHECK_MAIN()
