// What csrc/common/parallel.h takes of torch: parts of the grain's size, by threads in any order.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace torch::stable {

inline int num_threads = 4;  // a test may ask for others

inline uint32_t get_num_threads() { return static_cast<uint32_t>(num_threads); }

template <class Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  std::atomic<int64_t> next = begin;
  const auto take_parts = [&] {
    for (int64_t at = next.fetch_add(grain); at < end; at = next.fetch_add(grain)) {
      body(at, at + grain < end ? at + grain : end);
    }
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < num_threads && begin + i * grain < end; ++i) threads.emplace_back(take_parts);
  take_parts();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace torch::stable
