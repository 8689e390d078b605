// Whether a parallel region pays on this thread, by its measured overhead. Workers that wait awake
// begin within 2 us; sleeping ones (OMP_WAIT_POLICY=PASSIVE, more threads than processors, a
// virtual machine) within 30 to 100 us, which is more than many products of a model take.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace lmdecode {

// The estimate of one thread that starts regions. It only decides on how many threads work is done:
// results do not depend on it.
class ParallelGain {
 public:
  // gain: nanoseconds that a region saves if its workers are awake.
  bool pays(double gain) {
    if (gain > overhead_) return true;
    // Workers that nothing was given to sleep: only several regions in a row tell what one costs.
    if (++skipped_ < kSkipped) return false;
    if (skipped_ >= kSkipped + kTries - 1) skipped_ = 0;
    return true;
  }

  // Records the time of a region beyond its longest part, in nanoseconds. Most of an excess above
  // the limit is due to other processes.
  void record(double overhead) {
    overhead_ += (std::min(overhead, kMostOverhead) - overhead_) * kNewest;
  }

  double overhead() const { return overhead_; }

 private:
  static constexpr int kSkipped = 1024, kTries = 8;
  static constexpr double kNewest = 0.25, kMostOverhead = 200000.0;

  double overhead_ = 0.0;
  int skipped_ = 0;
};

inline ParallelGain& thread_parallel_gain() {
  thread_local ParallelGain gain;
  return gain;
}

// gain: as of ParallelGain::pays(). Tests of what parts compute let every region pay.
inline bool region_pays([[maybe_unused]] double gain) {
#ifdef LMD_ALL_REGIONS_PAY
  return true;
#else
  return thread_parallel_gain().pays(gain);
#endif
}

// Whether this thread works on a part of a region. Nested regions run serially.
inline bool& in_region() {
  thread_local bool is_in = false;
  return is_in;
}

// Measures the time of a region and of its parts.
class RegionTimer {
 public:
  RegionTimer() : begin_(now()) {}

  template <class Part>
  void time(const Part& part) {
    const int64_t begin = now();
    in_region() = true;
    part();
    in_region() = false;
    const int64_t taken = now() - begin;
    int64_t longest = longest_.load(std::memory_order_relaxed);
    while (taken > longest &&
           !longest_.compare_exchange_weak(longest, taken, std::memory_order_relaxed)) {
    }
  }

  // Called after the region.
  double overhead() const {
    return static_cast<double>(now() - begin_ - longest_.load(std::memory_order_relaxed));
  }

 private:
  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

  const int64_t begin_;
  std::atomic<int64_t> longest_{0};
};

}  // namespace lmdecode
