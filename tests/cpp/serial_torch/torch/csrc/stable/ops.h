// What csrc/common/parallel.h takes of torch: parts one after the other on the calling thread.
#pragma once

#include <cstdint>

namespace torch::stable {

inline uint32_t get_num_threads() { return 1; }

template <class Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  for (; begin < end; begin += grain) body(begin, begin + grain < end ? begin + grain : end);
}

}  // namespace torch::stable
