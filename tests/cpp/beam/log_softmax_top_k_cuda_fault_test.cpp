// The tests of rows held to a trie notice a planted fault (LMD_PLANT_MISSING_BARRIER).
#include <iostream>

#include "check.h"
#include "emulated_log_softmax_top_k.h"

namespace lmdecode::beam::test {
namespace {

TEST(planted_fault_is_noticed) {
  for (uint64_t schedule = 0; schedule < 6; ++schedule) {
    int reported = 0;
    std::string first_report;
    for (uint64_t seed = 1; seed <= 6; ++seed) {
      Random random(seed);
      const BeamCase c = random_case(seed, 2, 90);
      ProcessorCase processors = random_processors(random, c.params);
      add_trie(random, c.params, &processors, true);
      Layout layout = random_layout(random, c);
      layout.plan.threads = layout.processed_plan.threads = 64;
      try {
        run_emulated(c, &processors, layout, schedule);
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
}  // namespace lmdecode::beam::test

CHECK_MAIN()
