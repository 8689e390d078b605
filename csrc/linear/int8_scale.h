// A row rounded to int8: whole multiples of its largest magnitude / 127.
#pragma once

#include "simd/vec_math.h"

namespace lmdecode::LMD_SIMD::linear {

constexpr float kInt8Max = 127.0f;
// A row of smaller magnitudes counts as 0: its scaling factor would overflow.
constexpr float kLeastScaledMagnitude = 0x1p-100f;

// q = round(x * factor), x is about q * scale. magnitude_bits: the bits of the largest |x|. Both
// are 0 if it is 0; if it is inf or NaN, scale is NaN and factor 0.
struct Int8Scale {
  float factor = 0.0f;
  float scale = 0.0f;

  static Int8Scale of(uint32_t magnitude_bits) {
    if (magnitude_bits >= 0x7f800000u) return {0.0f, float_of(0x7fc00000u)};
    const float magnitude = float_of(magnitude_bits);
    if (magnitude < kLeastScaledMagnitude) return {};
    return {kInt8Max / magnitude, magnitude / kInt8Max};
  }
};

inline uint32_t magnitude_bits(float value) { return bits_of(value) & 0x7fffffffu; }

// Returns the bits of the largest magnitude of values[0], values[stride], ...; 0 if count is 0.
inline uint32_t largest_magnitude_bits(const float* values, int64_t count, int64_t stride) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = magnitude_bits(values[i * stride]);
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// Each lane the larger of `largest`, bits of a magnitude, and of value's.
inline U32 larger_magnitude_bits(U32 largest, F32 value) {
  const U32 bits = bit_cast_u32(value) & splat_u32(0x7fffffffu);
#if defined(LMD_SIMD_AVX512)
  return {_mm512_max_epu32(bits.v, largest.v)};
#else
  return select(bits >= largest, bits, largest);
#endif
}

inline uint32_t largest_lane(U32 v) {
#if defined(LMD_SIMD_AVX512)
  return _mm512_reduce_max_epu32(v.v);
#else
  alignas(64) uint32_t lane[kLanes];
  store(lane, v);
  uint32_t result = 0;
  for (const uint32_t bits : lane) result = bits > result ? bits : result;
  return result;
#endif
}

inline int32_t to_int8(float value, float factor) {
  if (factor == 0.0f) return 0;  // 0 times inf would be NaN
  const float product = value * factor;
  return static_cast<int32_t>((product + kRoundMagic) - kRoundMagic);
}

}  // namespace lmdecode::LMD_SIMD::linear
