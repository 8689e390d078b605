// Bit patterns of floats, and the order of f32 values as unsigned integers.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace lmdecode {

LMD_HOST_DEVICE uint32_t bits_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  return __builtin_bit_cast(uint32_t, value);
#endif
}

LMD_HOST_DEVICE float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

LMD_HOST_DEVICE uint64_t bits_of(double value) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint64_t>(__double_as_longlong(value));
#else
  return __builtin_bit_cast(uint64_t, value);
#endif
}

LMD_HOST_DEVICE double double_of(uint64_t bits) {
#if defined(__CUDA_ARCH__)
  return __longlong_as_double(static_cast<long long>(bits));
#else
  return __builtin_bit_cast(double, bits);
#endif
}

// A number that orders f32 values as unsigned integers: a < b  <=>  order_key(a) < order_key(b),
// and -0.0 has the key of +0.0. NaN has no place in this order: callers replace it by -inf first.
LMD_HOST_DEVICE uint32_t order_key(float value) {
  const uint32_t bits = bits_of(value + 0.0f);  // -0.0 + 0.0 is +0.0
  return (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
}

// The value of a key (never -0.0).
LMD_HOST_DEVICE float value_of_key(uint32_t key) {
  return float_of((key & 0x80000000u) ? key & 0x7fffffffu : ~key);
}

constexpr uint32_t kMinusInfinityKey = 0x007fffffu;
constexpr uint32_t kPlusInfinityKey = 0xff800000u;

LMD_HOST_DEVICE float minus_infinity() { return float_of(0xff800000u); }
LMD_HOST_DEVICE float plus_infinity() { return float_of(0x7f800000u); }

LMD_HOST_DEVICE int leading_zeros(uint64_t value) {  // value != 0
#if defined(__CUDA_ARCH__)
  return __clzll(static_cast<long long>(value));
#else
  return __builtin_clzll(value);
#endif
}

}  // namespace lmdecode
