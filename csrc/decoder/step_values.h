// Values of a dtype from f32, round to nearest even: the other way of common/half.h.
#pragma once

#include "common/half.h"

namespace lmdecode::decoder {

template <class T>
struct ValueOf;

template <>
struct ValueOf<float> {
  LMD_HOST_DEVICE static float from(float value) { return value; }
};

template <>
struct ValueOf<BFloat16> {
  LMD_HOST_DEVICE static BFloat16 from(float value) {
    const uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fc0};
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
  }
};

template <>
struct ValueOf<Half> {
  LMD_HOST_DEVICE static Half from(float value) {
    const uint32_t sign = (bits_of(value) >> 16) & 0x8000u;
    const uint32_t bits = bits_of(value) & 0x7fffffffu;
    uint32_t magnitude;
    if (bits > 0x7f800000u) {
      magnitude = 0x7e00u;
    } else if (bits >= 0x477ff000u) {  // halfway from the largest to the next
      magnitude = 0x7c00u;
    } else if (bits < 0x38800000u) {
      // Beside 0.5 the last bit of an f32 is 2^-24, that of a subnormal f16.
      magnitude = bits_of(float_of(bits) + 0.5f) - 0x3f000000u;
    } else {
      magnitude = (bits + 0xfffu + ((bits >> 13) & 1u) - 0x38000000u) >> 13;
    }
    return {static_cast<uint16_t>(sign | magnitude)};
  }
};

}  // namespace lmdecode::decoder
