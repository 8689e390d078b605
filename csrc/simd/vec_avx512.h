// simd/vec.h for AVX-512 (F, BW, DQ, VL).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "common/exp_weight.h"
#include "common/half.h"

namespace lmdecode::LMD_SIMD {

constexpr int kLanes = 16;

struct F32 {
  __m512 v;
};
struct U32 {
  __m512i v;
};
using Mask = __mmask16;

inline F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F32 load(const BFloat16* p) {
  const __m512i wide =
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline F32 load(const Half* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store(float* p, F32 a) { _mm512_storeu_ps(p, a.v); }
inline F32 splat(float a) { return {_mm512_set1_ps(a)}; }
inline F32 operator+(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32 operator-(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32 operator*(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32 operator/(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32 multiply_add(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F32 abs(F32 a) { return {_mm512_abs_ps(a.v)}; }
inline F32 round_even(F32 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a * 2^exponent; exponent a whole number; neither a nor the result subnormal.
inline F32 multiply_power_of_two(F32 a, F32 exponent) {
  return {_mm512_scalef_ps(a.v, exponent.v)};
}
inline Mask operator>=(F32 a, F32 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
inline Mask operator>(F32 a, F32 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
inline Mask operator==(F32 a, F32 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
inline Mask is_nan(F32 a, F32 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q); }
inline F32 select(Mask m, F32 a, F32 b) { return {_mm512_mask_blend_ps(m, b.v, a.v)}; }
// f32((f64(a) - b) - c)
inline F32 subtract_f64(F32 a, double b, double c) {
  const __m512d first = _mm512_set1_pd(b), second = _mm512_set1_pd(c);
  const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(a.v));
  const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(a.v, 1));
  const __m256 low32 = _mm512_cvtpd_ps(_mm512_sub_pd(_mm512_sub_pd(low, first), second));
  const __m256 high32 = _mm512_cvtpd_ps(_mm512_sub_pd(_mm512_sub_pd(high, first), second));
  return {_mm512_insertf32x8(_mm512_castps256_ps512(low32), high32, 1)};
}
inline F32 approximate_reciprocal(F32 a) { return {_mm512_rcp14_ps(a.v)}; }
inline float reduce_max(F32 a) { return _mm512_reduce_max_ps(a.v); }
// Lane i is added to lane i + half, then halves of that.
inline float reduce_add(F32 a) {
  const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}

inline U32 load(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store(uint32_t* p, U32 a) { _mm512_storeu_si512(p, a.v); }
inline U32 splat_u32(uint32_t a) { return {_mm512_set1_epi32(static_cast<int>(a))}; }
inline U32 iota_u32() {
  return {_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)};
}
inline U32 operator+(U32 a, U32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline U32 operator^(U32 a, U32 b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline U32 operator&(U32 a, U32 b) { return {_mm512_and_si512(a.v, b.v)}; }
inline U32 operator|(U32 a, U32 b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int N>
inline U32 shift_right(U32 a) {
  return {_mm512_srli_epi32(a.v, N)};
}
inline U32 shift_left_one(U32 n) { return {_mm512_sllv_epi32(_mm512_set1_epi32(1), n.v)}; }
inline U32 sign_mask(U32 a) { return {_mm512_srai_epi32(a.v, 31)}; }
inline Mask operator>=(U32 a, U32 b) { return _mm512_cmpge_epu32_mask(a.v, b.v); }
inline Mask operator==(U32 a, U32 b) { return _mm512_cmpeq_epi32_mask(a.v, b.v); }
inline U32 select(Mask m, U32 a, U32 b) { return {_mm512_mask_blend_epi32(m, b.v, a.v)}; }
inline U32 bit_cast_u32(F32 a) { return {_mm512_castps_si512(a.v)}; }
inline F32 bit_cast_f32(U32 a) { return {_mm512_castsi512_ps(a.v)}; }
inline F32 convert_u32(U32 a) { return {_mm512_cvtepu32_ps(a.v)}; }

// 64-bit lanes: the even 32-bit lanes of a vector are their low halves.
struct U64 {
  __m512i v;
};
inline U64 even_lanes(U32 a) {
  return {a.v};
}  // the high halves are left as they are: multiply_low ignores them
inline U64 odd_lanes(U32 a) { return {_mm512_srli_epi64(a.v, 32)}; }
inline U32 merge_lanes(U64 even, U64 odd) {
  return {_mm512_mask_blend_epi32(0xaaaa, even.v, _mm512_slli_epi64(odd.v, 32))};
}
inline U64 splat_u64(uint64_t a) { return {_mm512_set1_epi64(static_cast<long long>(a))}; }
inline U64 multiply_low(U64 a, U64 m) {
  return {_mm512_mul_epu32(a.v, m.v)};
}  // of the low halves, 64 bits
inline U64 operator+(U64 a, U64 b) { return {_mm512_add_epi64(a.v, b.v)}; }
inline void store(uint64_t* p, U64 a) { _mm512_storeu_si512(p, a.v); }
inline U64 high_half(U64 a) { return {_mm512_srli_epi64(a.v, 32)}; }
inline U64 xor3(U64 a, U64 b, U64 c) { return {_mm512_ternarylogic_epi64(a.v, b.v, c.v, 0x96)}; }

// A 4 x 4 transposition within each 128 bits: with lane i of w[j] holding word j of group
// order4()[i], w becomes the words of groups 0, 1, 2, ... in their order.
inline U32 order4() {
  return {_mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0)};
}
inline void transpose4(U32 (&w)[4]) {
  const __m512i a = _mm512_unpacklo_epi32(w[0].v, w[1].v),
                b = _mm512_unpackhi_epi32(w[0].v, w[1].v);
  const __m512i c = _mm512_unpacklo_epi32(w[2].v, w[3].v),
                d = _mm512_unpackhi_epi32(w[2].v, w[3].v);
  w[0].v = _mm512_unpacklo_epi64(a, c);
  w[1].v = _mm512_unpackhi_epi64(a, c);
  w[2].v = _mm512_unpacklo_epi64(b, d);
  w[3].v = _mm512_unpackhi_epi64(b, d);
}

inline uint32_t bits(Mask m) { return m; }
inline Mask operator_or(Mask a, Mask b) { return a | b; }
inline int count(uint32_t mask_bits) { return __builtin_popcount(mask_bits); }

inline void compress_store(float* p, uint32_t mask, F32 a) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps(static_cast<__mmask16>(mask), a.v));
}
inline void compress_store(uint32_t* p, uint32_t mask, U32 a) {
  _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), a.v));
}
// The 64-bit elements p[0 .. kLanes), compressed.
inline void compress_store(uint64_t* p, uint32_t mask, const uint64_t* from) {
  const __m512i low = _mm512_loadu_si512(from), high = _mm512_loadu_si512(from + 8);
  _mm512_storeu_si512(p, _mm512_maskz_compress_epi64(static_cast<__mmask8>(mask), low));
  p += __builtin_popcount(mask & 0xff);
  _mm512_storeu_si512(p, _mm512_maskz_compress_epi64(static_cast<__mmask8>(mask >> 8), high));
}

class MassSum {
 public:
  void add(F32 a) {
    low_ = _mm512_add_epi64(low_, low_mass(a));
    high_ = _mm512_add_epi64(high_, high_mass(a));
  }
  // Adds a to *this, and the lanes of the mask to *masked as well.
  void add(F32 a, Mask m, MassSum* masked) {
    const __m512i low = low_mass(a), high = high_mass(a);
    low_ = _mm512_add_epi64(low_, low);
    high_ = _mm512_add_epi64(high_, high);
    masked->low_ = _mm512_mask_add_epi64(masked->low_, static_cast<__mmask8>(m), masked->low_, low);
    masked->high_ =
        _mm512_mask_add_epi64(masked->high_, static_cast<__mmask8>(m >> 8), masked->high_, high);
  }
  // Adds the lanes of the mask of masses p[0 .. kLanes).
  void add(const uint64_t* p, Mask m) {
    low_ = _mm512_mask_add_epi64(low_, static_cast<__mmask8>(m), low_, _mm512_loadu_si512(p));
    high_ = _mm512_mask_add_epi64(high_, static_cast<__mmask8>(m >> 8), high_,
                                  _mm512_loadu_si512(p + 8));
  }
  uint64_t total() const {
    return static_cast<uint64_t>(_mm512_reduce_add_epi64(_mm512_add_epi64(low_, high_)));
  }
  static void store_masses(uint64_t* p, F32 a) {
    _mm512_storeu_si512(p, low_mass(a));
    _mm512_storeu_si512(p + 8, high_mass(a));
  }

 private:
  static __m512i low_mass(F32 a) { return _mm512_cvttps_epu64(_mm512_castps512_ps256(a.v)); }
  static __m512i high_mass(F32 a) { return _mm512_cvttps_epu64(_mm512_extractf32x8_ps(a.v, 1)); }
  __m512i low_ = _mm512_setzero_si512(), high_ = _mm512_setzero_si512();
};

}  // namespace lmdecode::LMD_SIMD
