// The adapter through which csrc reaches torch outside bindings/: torch's own threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

namespace lmdecode {

// Threads that parallel_for can use: for sizes of parts, never for results.
inline int64_t num_threads() { return static_cast<int64_t>(torch::stable::get_num_threads()); }

// Calls body(begin, end) for parts of [0, size) on torch's threads, in parts of at least `grain`.
// The body must not throw: an exception could not cross the library boundary as itself.
template <class Body>
void parallel_for(int64_t size, int64_t grain, const Body& body) {
  if (size <= 0) return;
  if (size <= grain) {
    body(int64_t{0}, size);  // no detour where there is one part
    return;
  }
  torch::stable::parallel_for(0, size, grain, body);
}

}  // namespace lmdecode
