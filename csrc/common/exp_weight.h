// The weight of a token, exp((logit - max) / temperature), and its mass, the weight in 64-bit fixed
// point.
//
// Sums of masses are integer sums: they do not depend on the order of summation, so neither on the
// thread count, nor on the batch, nor on the SIMD width, nor on the device. For the same reason the
// weight is one fixed sequence of f32 operations, each rounded to nearest, with fused multiply-adds
// where they are written and nowhere else: simd/vec.h and the CUDA kernels repeat exactly this
// sequence. The polynomial is within 1.7e-7 of exp2, relative.
#pragma once

#include <cstdint>

#include "common/bits.h"

namespace lmdecode {

// 2^f on [-0.5, 0.5] = 1 + f * (kExp2C1 + f * (kExp2C2 + ...)); minimax in relative error, p(0)
// = 1.
constexpr float kExp2C1 = 0x1.62e42ap-1f;
constexpr float kExp2C2 = 0x1.ebf9bcp-3f;
constexpr float kExp2C3 = 0x1.c6b752p-5f;
constexpr float kExp2C4 = 0x1.3cea88p-7f;
constexpr float kExp2C5 = 0x1.5bba14p-10f;
// Exponents below this are raised to it: a weight is never zero nor subnormal, its mass is zero
// long before.
constexpr float kMinExponent = -125.0f;
// value + kRoundMagic - kRoundMagic rounds to the nearest integer, ties to even, for |value| <
// 2^22.
constexpr float kRoundMagic = 12582912.0f;
constexpr double kLog2E = 1.4426950408889634074;
constexpr float kMaxFloat = 0x1.fffffep127f;

// a * b + c, rounded once: everywhere, by the library where the processor has no such instruction.
LMD_HOST_DEVICE float fused_multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

// Factor from logits to exponents of two: log2(e) / temperature, finite, so that 0 * factor is 0.
LMD_HOST_DEVICE float exponent_factor(float temperature) {
  const double factor = kLog2E / static_cast<double>(temperature);
  return factor < static_cast<double>(kMaxFloat) ? static_cast<float>(factor) : kMaxFloat;
}

// The exponent of two of a weight, at least kMinExponent; value <= max, both finite; factor of
// exponent_factor(). It does not fall where the value grows.
LMD_HOST_DEVICE float weight_exponent(float value, float max, float factor) {
  const float exponent = (value - max) * factor;
  return exponent > kMinExponent ? exponent : kMinExponent;
}

// 2^(exponent + scale); 0 <= scale <= 63.
LMD_HOST_DEVICE float scaled_exp2(float exponent, int scale) {
  const float whole = (exponent + kRoundMagic) - kRoundMagic;
  const float f = exponent - whole;
  float p = kExp2C5;
  p = fused_multiply_add(p, f, kExp2C4);
  p = fused_multiply_add(p, f, kExp2C3);
  p = fused_multiply_add(p, f, kExp2C2);
  p = fused_multiply_add(p, f, kExp2C1);
  p = fused_multiply_add(p, f, 1.0f);
  return float_of(bits_of(p) + (static_cast<uint32_t>(static_cast<int32_t>(whole) + scale) << 23));
}

// weight * 2^scale.
LMD_HOST_DEVICE float scaled_weight(float value, float max, float factor, int scale) {
  return scaled_exp2(weight_exponent(value, max, factor), scale);
}

LMD_HOST_DEVICE float token_weight(float value, float max, float factor) {
  return scaled_weight(value, max, factor, 0);
}

// Fraction bits of a mass: the masses of vocab_size tokens sum to at most 2^63. 43 up to a
// vocabulary of 2^20.
LMD_HOST_DEVICE int mass_fraction_bits(int64_t vocab_size) {
  int bits = 43;
  for (int64_t capacity = int64_t{1} << 20; capacity < vocab_size && bits > 1; capacity *= 2)
    --bits;
  return bits;
}

// The mass of a token: floor(weight * 2^fraction_bits).
LMD_HOST_DEVICE uint64_t token_mass(float value, float max, float factor, int fraction_bits) {
  return static_cast<uint64_t>(scaled_weight(value, max, factor, fraction_bits));
}

// The mass of a probability given as such: floor(min(max(p, 0), 1) * 2^fraction_bits).
LMD_HOST_DEVICE uint64_t probability_mass(float probability, int fraction_bits) {
  const float clamped = probability > 0.0f ? (probability < 1.0f ? probability : 1.0f) : 0.0f;
  return static_cast<uint64_t>(clamped *
                               float_of(static_cast<uint32_t>(127 + fraction_bits) << 23));
}

}  // namespace lmdecode
