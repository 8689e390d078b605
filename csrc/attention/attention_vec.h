// What attention needs of vectors beside simd/vec.h: 2^x down to zero, squares transposed, rounding
// to half types. Not the same bits at every level: where the processor has no fused operation,
// accumulate() rounds twice.
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

// 2^x, within 3e-7, relative; 0 for -inf and below the normal numbers (AVX-512: below the
// subnormal ones); NaN for NaN. x <= 127.
inline F32 exp2_of(F32 x) {
#if defined(LMD_SIMD_AVX512)
  const __m512 f = _mm512_reduce_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return {_mm512_scalef_ps(exp2_polynomial({f}).v, _mm512_sub_ps(x.v, f))};
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

// row[i] becomes lane i of the rows.
inline void transpose(F32 (&row)[kLanes]) {
#if defined(LMD_SIMD_AVX512)
  __m512 a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_ps(row[2 * i].v, row[2 * i + 1].v);
    a[2 * i + 1] = _mm512_unpackhi_ps(row[2 * i].v, row[2 * i + 1].v);
  }
  const auto low = [](__m512 x, __m512 y) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
  };
  const auto high = [](__m512 x, __m512 y) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
  };
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // b[4 i + j]: columns j, j + 4, ... of rows 4 i to 4 i + 3
    b[4 * i] = low(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = high(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = low(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = high(a[4 * i + 1], a[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512 even_low = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88);
    const __m512 even_high = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88);
    const __m512 odd_low = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xdd);
    const __m512 odd_high = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xdd);
    row[j].v = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
    row[8 + j].v = _mm512_shuffle_f32x4(even_low, even_high, 0xdd);
    row[4 + j].v = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
    row[12 + j].v = _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
  }
#elif defined(LMD_SIMD_AVX2)
  __m256 a[8], b[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = _mm256_unpacklo_ps(row[2 * i].v, row[2 * i + 1].v);
    a[2 * i + 1] = _mm256_unpackhi_ps(row[2 * i].v, row[2 * i + 1].v);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    b[4 * i] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
    b[4 * i + 1] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0xee);
    b[4 * i + 2] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
    b[4 * i + 3] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    row[j].v = _mm256_permute2f128_ps(b[j], b[4 + j], 0x20);
    row[4 + j].v = _mm256_permute2f128_ps(b[j], b[4 + j], 0x31);
  }
#else
  float lane[kLanes][kLanes];
  for (int i = 0; i < kLanes; ++i) store(lane[i], row[i]);
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < kLanes; ++j) row[i].v[j] = lane[j][i];
  }
#endif
}

// ---- rounding to nearest, ties to even

inline uint16_t bfloat16_bits(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline uint16_t half_bits(float value) {
  const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to 2^16
  if (magnitude < 0x38800000u) {  // below 2^-14: in units of 2^-24, by an addition that rounds
    const float rounded = float_of(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_of(rounded) - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13));
}

inline void store_one(float* p, float value) { *p = value; }
inline void store_one(BFloat16* p, float value) { p->bits = bfloat16_bits(value); }
inline void store_one(Half* p, float value) { p->bits = half_bits(value); }

// The first `size` lanes; size <= kLanes.
template <class T>
inline void store_part(T* p, F32 a, int64_t size) {
  alignas(64) float lane[kLanes];
  store(lane, a);
  for (int64_t i = 0; i < size; ++i) store_one(p + i, lane[i]);
}

inline void store_all(float* p, F32 a) { store(p, a); }
#if defined(LMD_SIMD_AVX512)
inline void store_all(BFloat16* p, F32 a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  rounded = _mm512_mask_mov_epi32(rounded, is_nan(a, a), quiet);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}
inline void store_all(Half* p, F32 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#else
inline void store_all(BFloat16* p, F32 a) { store_part(p, a, kLanes); }
#if defined(LMD_SIMD_AVX2)
inline void store_all(Half* p, F32 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#else
inline void store_all(Half* p, F32 a) { store_part(p, a, kLanes); }
#endif
#endif

// p[0 .. size) = from[0 .. size) times a factor that is 1 / divisor.
template <class T>
inline void store_quotient(T* p, const float* from, int64_t size, float divisor) {
  const F32 by = splat(divisor);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store_all(p + i, load(from + i) / by);
  if (i < size) store_part(p + i, load_part(from + i, static_cast<int>(size - i), 0.0f) / by, size - i);
}

}  // namespace lmdecode::LMD_SIMD
