// Functions of vectors beside simd/vec.h: 2^x down to zero, exp, tanh, the normal distribution. Not
// the same bits at every level: where the processor has no fused operation, accumulate() rounds
// twice.
#pragma once

#include "simd/vec.h"

namespace lmdecode::LMD_SIMD {

inline F32 accumulate(F32 a, F32 b, F32 c) {
#if defined(LMD_SIMD_AVX2) || defined(LMD_SIMD_AVX512)
  return multiply_add(a, b, c);
#else
  return a * b + c;
#endif
}

inline F32 exp2_polynomial(F32 f) {
  F32 p = splat(kExp2C5);
  p = accumulate(p, f, splat(kExp2C4));
  p = accumulate(p, f, splat(kExp2C3));
  p = accumulate(p, f, splat(kExp2C2));
  p = accumulate(p, f, splat(kExp2C1));
  return accumulate(p, f, splat(1.0f));
}

// 2^x, within 3e-7, relative; 0 for -inf and below the normal numbers; NaN for NaN. x <= 127.
inline F32 exp2_of(F32 x) {
#if defined(LMD_SIMD_AVX512)
  // Subnormal results would cost Intel's processors an assist, some hundred cycles.
  const __m512 least = _mm512_set1_ps(-126.0f), clamped = _mm512_max_ps(least, x.v);  // NaN stays
  const __m512 f = _mm512_reduce_ps(clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 power = _mm512_scalef_ps(exp2_polynomial({f}).v, _mm512_sub_ps(clamped, f));
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, least, _CMP_NLT_UQ), power)};
#else
  const F32 least = splat(-126.0f);
  const F32 clamped = max(least, x);  // NaN stays
  F32 whole = round_even(clamped);
  const F32 f = clamped - whole;
  whole = select(is_nan(x, x), splat(0.0f), whole);
  const F32 power = multiply_power_of_two(exp2_polynomial(f), whole);
  return select(least > x, splat(0.0f), power);
#endif
}

inline float exp2_of(float x) {
  alignas(64) float lane[kLanes];
  store(lane, exp2_of(splat(x)));
  return lane[0];
}

// tanh, within 3e-7, relative.
inline F32 tanh_of(F32 x) {
  const F32 magnitude = abs(x), square = x * x;
  F32 p = splat(-1382.0f / 155925.0f);
  p = accumulate(p, square, splat(62.0f / 2835.0f));
  p = accumulate(p, square, splat(-17.0f / 315.0f));
  p = accumulate(p, square, splat(2.0f / 15.0f));
  p = accumulate(p, square, splat(-1.0f / 3.0f));
  const F32 small = accumulate(p * square, x, x);
  // 1 - 2 / (e^2|x| + 1), with the sign of x; e^2|x| stays finite.
  const F32 limit = splat(20.0f);
  const F32 bounded = select(magnitude > limit, limit, magnitude);
  const F32 e = exp2_of(bounded * splat(static_cast<float>(2 * kLog2E)));
  const F32 large = splat(1.0f) - splat(2.0f) / (e + splat(1.0f));
  const F32 with_sign = select(splat(0.0f) > x, splat(0.0f) - large, large);
  return select(splat(0.3f) > magnitude, small, with_sign);
}

// e^x, within 3e-7, relative, for x of [-87, 88]; beyond, as at the ends. NaN for NaN.
inline F32 exp_of(F32 x) {
  const F32 least = splat(-87.0f), most = splat(88.0f);
  const F32 bounded = select(x > most, most, max(least, x));  // NaN stays
  F32 whole = round_even(bounded * splat(static_cast<float>(kLog2E)));
  whole = select(is_nan(x, x), splat(0.0f), whole);
  // x - whole log(2), in two steps: a rounded x log2(e) would lose as many bits as whole has.
  F32 rest = multiply_add(whole, splat(-0x1.62e4p-1f), bounded);
  rest = multiply_add(whole, splat(-0x1.7f7d1cp-20f), rest);
  return multiply_power_of_two(exp2_polynomial(rest * splat(static_cast<float>(kLog2E))), whole);
}

// Phi(-u), u >= 0: the upper tail of the normal distribution. Within 6e-7, relative, up to 13.2; 0
// beyond.
inline F32 normal_tail(F32 u) {
  const F32 limit = splat(13.2f);
  const F32 bounded = select(u > limit, limit, u);
  const F32 square = bounded * bounded;
  const F32 square_error = multiply_add(bounded, bounded, splat(0.0f) - square);
  const F32 half = splat(0.5f), one = splat(1.0f);
  const F32 power = exp_of(splat(-0.5f) * square) * (one - half * square_error);
  // Phi(-u) exp(u^2 / 2) (1 + u / 2) is smooth: a polynomial, minimax in relative error, of
  const F32 s = (bounded - splat(4.0f)) / (bounded + splat(4.0f));
  F32 p = splat(0x1.0bb866p-12f);
  p = accumulate(p, s, splat(0x1.fcc2b6p-14f));
  p = accumulate(p, s, splat(-0x1.28406ep-9f));
  p = accumulate(p, s, splat(0x1.3685c0p-8f));
  p = accumulate(p, s, splat(-0x1.5b66c6p-11f));
  p = accumulate(p, s, splat(-0x1.612a08p-6f));
  p = accumulate(p, s, splat(0x1.1b6610p-4f));
  p = accumulate(p, s, splat(-0x1.1182f2p-3f));
  p = accumulate(p, s, splat(0x1.22078cp-2f));
  const F32 tail = p * power / (one + half * bounded);
  return select(u > limit, splat(0.0f), tail);
}

}  // namespace lmdecode::LMD_SIMD
