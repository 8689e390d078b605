// The tests of the kernel notice planted faults (LMD_PLANT_MISSING_BARRIER, LMD_PLANT_RACE).
#include <iostream>

#include "check.h"
#include "emulated_sample.h"

namespace lmdecode::sampling::test {
namespace {

// How many of the runs end in another result, and how many in a report of the emulation.
struct Noticed {
  int wrong = 0, reported = 0;
  std::string first_report;
};

Noticed run_faulty(uint64_t schedule) {
  Noticed noticed;
  for (uint64_t seed = 1; seed <= 16; ++seed) {
    Random random(seed);
    SampleCase c = random_case(seed, 2, 40 + random.below(100));
    c.params.top_k.rows = nullptr;  // a stage with a histogram
    c.params.top_k.value = 7;
    const SampleResult expected = run_cpu(c);
    SamplingLaunchPlan plan = random_plan(random, c);
    plan.threads = 64;
    try {
      noticed.wrong += !(run_emulated(c, plan, schedule) == expected);
    } catch (const std::exception& error) {
      if (noticed.reported++ == 0) noticed.first_report = error.what();
    }
  }
  return noticed;
}

TEST(planted_fault_is_noticed) {
  int noticed = 0;
  for (uint64_t schedule = 0; schedule < 10; ++schedule) {
    const Noticed n = run_faulty(schedule);
    std::cout << "schedule " << schedule << ": " << n.wrong << " wrong, " << n.reported
              << " reported " << n.first_report << std::endl;
    noticed += n.wrong + n.reported;
    // The race checker needs no lucky schedule.
    if (emulation::race_checker_active()) CHECK(n.reported > 0);
  }
  CHECK(noticed > 0);
}

}  // namespace
}  // namespace lmdecode::sampling::test

CHECK_MAIN()
