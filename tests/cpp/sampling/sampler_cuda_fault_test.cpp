// The tests of a sampler's kernels notice a planted fault (LMD_PLANT_MISSING_BARRIER).
#include <iostream>

#include "check.h"
#include "emulated_sampler.h"

namespace lmdecode::sampling::test {
namespace {

TEST(planted_fault_is_noticed) {
  for (uint64_t schedule = 0; schedule < 6; ++schedule) {
    int reported = 0;
    std::string first_report;
    for (uint64_t seed = 1; seed <= 6; ++seed) {
      Random random(seed);
      const Rows rows(layout_with(90, 16), 2);
      for (int64_t row = 0; row < 2; ++row) rows.insert(row, random_row(random, 90));
      const StepCase c(random, 2, 90);
      try {
        step(Emulated{64, 2, schedule}, c, rows);
      } catch (const std::exception& error) {
        if (reported++ == 0) first_report = error.what();
      }
    }
    std::cout << "schedule " << schedule << ": " << reported << " reported " << first_report
              << std::endl;
    CHECK(reported > 0);
  }
}

}  // namespace
}  // namespace lmdecode::sampling::test

CHECK_MAIN()
