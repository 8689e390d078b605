// f16 and bf16 to f32, exactly, one value at a time (vectors: simd/vec.h).
#pragma once

#include <cstdint>

#include "common/bits.h"

namespace lmdecode {

enum class DType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

// body(T{}), T being the type of the elements.
template <class Body>
void with_element_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(float{});
    case DType::kFloat16:
      return body(Half{});
    case DType::kBFloat16:
      return body(BFloat16{});
  }
}

LMD_HOST_DEVICE float to_float(float value) { return value; }

LMD_HOST_DEVICE float to_float(BFloat16 value) {
  return float_of(static_cast<uint32_t>(value.bits) << 16);
}

LMD_HOST_DEVICE float to_float(Half value) {
#if defined(__CUDA_ARCH__)
  float result;  // exact, without branches
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
#else
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  if (magnitude >= 0x0400u) return float_of(sign | ((magnitude << 13) + 0x38000000u));
  // Subnormal f16: magnitude * 2^-24 is a normal f32 (or zero), so the product is exact.
  const float value_abs = static_cast<float>(magnitude) * float_of(0x33800000u);
  return float_of(sign | bits_of(value_abs));
#endif
}

}  // namespace lmdecode
