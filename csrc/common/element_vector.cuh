// The elements of 16 bytes, which one instruction reads or writes.
#pragma once

#include <cstring>

#include "common/cuda_intrinsics.cuh"
#include "common/half.h"

namespace lmdecode {

template <class T>
struct ElementVector {
  static constexpr int kSize = 16 / sizeof(T);
  T elements[kSize];

  static __device__ bool fits(const T* row) { return reinterpret_cast<uintptr_t>(row) % 16 == 0; }
  // The address must be aligned.
  static __device__ ElementVector load(const T* from) {
    const uint4 bits = *reinterpret_cast<const uint4*>(from);
    ElementVector vector;
    memcpy(&vector, &bits, sizeof(bits));
    return vector;
  }
  __device__ void store(T* to) const {
    uint4 bits;
    memcpy(&bits, this, sizeof(bits));
    *reinterpret_cast<uint4*>(to) = bits;
  }
  __device__ float operator[](int i) const { return to_float(elements[i]); }
};

}  // namespace lmdecode
