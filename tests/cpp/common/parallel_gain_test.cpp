// When work is given to other threads: by what regions cost, and by nothing else.
#include "common/parallel_gain.h"

#include <thread>

#include "check.h"

using lmdecode::ParallelGain;

namespace {

constexpr double kAwake = 2000.0, kAsleep = 60000.0;

ParallelGain after(double overhead, int regions) {
  ParallelGain gain;
  for (int i = 0; i < regions; ++i) gain.record(overhead);
  return gain;
}

// How often out of so many times it pays.
int times(ParallelGain& gain, double nanoseconds, int calls) {
  int paid = 0;
  for (int i = 0; i < calls; ++i) paid += gain.pays(nanoseconds) ? 1 : 0;
  return paid;
}

}  // namespace

TEST(nothing_known_pays) { CHECK(ParallelGain().pays(1.0)); }

TEST(awake_workers_pay_for_small_work) { CHECK(after(kAwake, 50).pays(5000.0)); }

TEST(sleeping_workers_pay_for_large_work_alone) {
  ParallelGain gain = after(kAsleep, 50);
  CHECK(!gain.pays(20000.0));
  CHECK(gain.pays(100000.0));
}

TEST(what_was_left_out_is_tried_again_several_times_in_a_row) {
  ParallelGain gain = after(kAsleep, 50);
  CHECK_EQ(times(gain, 20000.0, 1023), 0);
  CHECK_EQ(times(gain, 20000.0, 8), 8);
  CHECK_EQ(times(gain, 20000.0, 1000), 0);
}

TEST(workers_found_awake_are_used_again) {
  ParallelGain gain = after(kAsleep, 50);
  times(gain, 20000.0, 1023);
  for (int i = 0; i < 8 && gain.pays(20000.0); ++i) gain.record(i == 0 ? kAsleep : kAwake);
  CHECK_EQ(times(gain, 20000.0, 100), 100);
}

TEST(an_interruption_does_not_count_for_long) {
  ParallelGain gain = after(kAwake, 50);
  gain.record(1e9);
  for (int i = 0; i < 8; ++i) gain.record(kAwake);
  CHECK(gain.pays(20000.0));
}

TEST(a_timer_leaves_out_the_longest_part) {
  lmdecode::RegionTimer timer;
  timer.time([] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); });
  CHECK(timer.overhead() < 50e6);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(timer.overhead() >= 50e6);
}

TEST(a_thread_knows_whether_it_is_in_a_region) {
  bool inside = false;
  lmdecode::RegionTimer().time([&] { inside = lmdecode::in_region(); });
  CHECK(inside);
  CHECK(!lmdecode::in_region());
}

CHECK_MAIN()
