// Rows to threads, each thread with scratch memory: what the CPU ops that need some share.
#pragma once

#include <atomic>
#include <stdexcept>
#include <string>

#include "common/float_mode.h"
#include "common/parallel.h"
#include "common/workspace.h"

namespace lmdecode {

// One for each thread, whatever the op: never two ops at a time.
inline Workspace& thread_workspace() {
  thread_local Workspace workspace;
  return workspace;
}

// Calls body(begin, end, workspace) under IEEE rules for parts of [0, size) of at least `grain`,
// with `bytes` of scratch aligned to 64. The body must not throw. Throws std::runtime_error where
// the memory cannot be had, after the parallel region; why() says what takes so much.
template <class Body, class Why>
void parallel_with_workspace(const char* op, int64_t size, int64_t grain, size_t bytes,
                             const Body& body, const Why& why) {
  std::atomic<bool> out_of_memory = false;
  parallel_for(size, grain, [&](int64_t begin, int64_t end) {
    void* memory = thread_workspace().reserve(bytes);
    if (memory == nullptr) {
      out_of_memory = true;
      return;
    }
    const ScopedIeeeMode ieee;
    body(begin, end, memory);
  });
  if (out_of_memory) {
    throw std::runtime_error(std::string(op) + ": no memory for " + std::to_string(bytes) +
                             " bytes of scratch a thread" + why());
  }
}

}  // namespace lmdecode
