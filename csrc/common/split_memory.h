// One block of memory dealt out to many arrays.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/host_device.h"

namespace lmdecode {

// Each array is aligned to 64, as the block is. With null for the block it only counts.
class SplitMemory {
 public:
  LMD_HOST_DEVICE explicit SplitMemory(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <class T>
  LMD_HOST_DEVICE void take(T** pointer, int64_t count) {
    *pointer = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + used_);
    used_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
  }

  // Bytes dealt out so far, a multiple of 64.
  LMD_HOST_DEVICE size_t used() const { return used_; }

 private:
  char* const memory_;
  size_t used_ = 0;
};

}  // namespace lmdecode
