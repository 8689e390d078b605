// Memory and numbers for tests of decoders under sanitizers.
#pragma once

#include <malloc.h>

#include <cstdint>
#include <cstdlib>

namespace lmdecode::decoder {

// Memory of exactly this size, aligned to 64, whose bounds are watched.
template <class T>
class Exactly {
 public:
  explicit Exactly(int64_t count, T value = T{}) : count_(count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    data_ = static_cast<T*>(memalign(64, bytes > 0 ? bytes : 1));
    for (int64_t i = 0; i < count; ++i) data_[i] = value;
  }
  Exactly(const Exactly&) = delete;
  ~Exactly() { std::free(data_); }
  T* get() { return data_; }
  T& operator[](int64_t i) { return data_[i]; }
  int64_t size() const { return count_; }

 private:
  T* data_;
  int64_t count_;
};

class Random {
 public:
  float next() {  // -1 to 1
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(static_cast<int32_t>(state_ >> 32)) / 2147483648.0f;
  }

 private:
  uint64_t state_ = 1;
};

}  // namespace lmdecode::decoder
