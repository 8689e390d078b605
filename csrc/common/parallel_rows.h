// Divides rows among threads, with scratch memory if an op needs it. Shared by the CPU ops.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "common/float_mode.h"
#include "common/parallel.h"
#include "common/parallel_gain.h"

// Scratch memory of a thread, kept between calls: a fresh allocation of this size would be mapped,
// and fault, each time.

namespace lmdecode {

class Workspace {
 public:
  Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace() { std::free(memory_); }

  // Makes room for `bytes`, aligned to 64. Contents are lost. Null where memory is short: it is
  // called in parallel regions, which nothing may be thrown from.
  void* reserve(size_t bytes) {
    if (bytes > size_) {
      // Sizes that grow by little, call after call, are seldom met.
      if (bytes < size_ + size_ / 2) bytes = size_ + size_ / 2;
      std::free(memory_);
      size_ = 0;
      memory_ = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
      if (memory_ == nullptr) return nullptr;
      size_ = bytes;
    }
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  size_t size_ = 0;
};

// The least time of a task for another thread: waking one takes about 10 us. Times are estimates,
// right within a factor of a few: they only keep small work on one thread.
constexpr double kMinTaskNanoseconds = 25000.0;

inline int64_t task_rows(double row_nanoseconds, double task_nanoseconds = kMinTaskNanoseconds) {
  return 1 + static_cast<int64_t>(task_nanoseconds / row_nanoseconds);
}

// Calls body(begin, end) under IEEE rules for parts of [0, rows), each worth a thread. The body
// must not throw.
template <class Body>
void parallel_rows(int64_t rows, double row_nanoseconds, const Body& body,
                   double task_nanoseconds = kMinTaskNanoseconds) {
  const int64_t grain = task_rows(row_nanoseconds, task_nanoseconds);
  const auto part = [&](int64_t begin, int64_t end) {
    const ScopedIeeeMode ieee;
    body(begin, end);
  };
  if (rows <= 0) return;
  if (rows <= grain || in_region()) return part(0, rows);
  const int64_t parts = std::min(std::max<int64_t>(num_threads(), 2), (rows + grain - 1) / grain);
  const double gain =
      static_cast<double>(rows) * row_nanoseconds * (1.0 - 1.0 / static_cast<double>(parts));
  if (!region_pays(gain)) return part(0, rows);
  RegionTimer timer;
  torch::stable::parallel_for(
      0, rows, grain, [&](int64_t begin, int64_t end) { timer.time([&] { part(begin, end); }); });
  thread_parallel_gain().record(timer.overhead());
}

// One for each thread, shared by all ops: a thread runs one op at a time.
inline Workspace& thread_workspace() {
  thread_local Workspace workspace;
  return workspace;
}

struct NoReason {
  std::string operator()() const { return {}; }
};

// Likewise body(begin, end, memory), with `bytes` of scratch aligned to 64. Throws
// std::runtime_error where the memory cannot be had, after the parallel region; why() says what
// takes so much.
template <class Body, class Why = NoReason>
void parallel_rows(const char* op, int64_t rows, double row_nanoseconds, size_t bytes,
                   const Body& body, const Why& why = {}) {
  std::atomic<bool> out_of_memory = false;
  parallel_rows(rows, row_nanoseconds, [&](int64_t begin, int64_t end) {
    void* const memory = thread_workspace().reserve(bytes);
    if (memory == nullptr) {
      out_of_memory = true;
    } else {
      body(begin, end, memory);
    }
  });
  if (out_of_memory) {
    throw std::runtime_error(std::string(op) + ": no memory for " + std::to_string(bytes) +
                             " bytes of scratch a thread" + why());
  }
}

}  // namespace lmdecode
