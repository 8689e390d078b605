// f32 to f16 and bf16: to nearest, ties to even, one value at a time (vectors: simd/vec_round.h).
#pragma once

#include "common/half.h"

namespace lmdecode {

LMD_HOST_DEVICE uint16_t bfloat16_bits(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

LMD_HOST_DEVICE uint16_t half_bits(float value) {
  const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to 2^16
  if (magnitude < 0x38800000u) {  // below 2^-14: in units of 2^-24, by an addition that rounds
    const float rounded = float_of(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_of(rounded) - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign |
                               ((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13));
}

// The nearest number of a dtype.
LMD_HOST_DEVICE float rounded_to(DType dtype, float value) {
  if (dtype == DType::kFloat16) return to_float(Half{half_bits(value)});
  if (dtype == DType::kBFloat16) return to_float(BFloat16{bfloat16_bits(value)});
  return value;
}

}  // namespace lmdecode
