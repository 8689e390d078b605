// Scratch memory of a thread, kept between calls: a fresh allocation of this size would be mapped,
// and fault, each time.
#pragma once

#include <cstddef>
#include <cstdlib>

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

}  // namespace lmdecode
