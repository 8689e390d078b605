// simd/vec.h for AVX2 (with F16C).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "common/exp_weight.h"
#include "common/half.h"

namespace lmdecode::LMD_SIMD {

constexpr int kLanes = 8;

struct F32 {
  __m256 v;
};
struct U32 {
  __m256i v;
};
struct Mask {
  __m256i v;  // all ones or all zeros in each 32-bit lane
};

inline F32 load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline F32 load(const BFloat16* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
inline F32 load(const Half* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline void store(float* p, F32 a) { _mm256_storeu_ps(p, a.v); }
inline F32 splat(float a) { return {_mm256_set1_ps(a)}; }
inline F32 operator+(F32 a, F32 b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F32 operator-(F32 a, F32 b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F32 operator*(F32 a, F32 b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F32 operator/(F32 a, F32 b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.v, b.v)}; }
inline F32 multiply_add(F32 a, F32 b, F32 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline F32 abs(F32 a) {
  return {_mm256_and_ps(a.v, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)))};
}
inline F32 round_even(F32 a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline F32 multiply_power_of_two(F32 a, F32 exponent) {
  const __m256i shifted = _mm256_slli_epi32(_mm256_cvtps_epi32(exponent.v), 23);
  return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.v), shifted))};
}
inline Mask operator>=(F32 a, F32 b) {
  return {_mm256_castps_si256(_mm256_cmp_ps(a.v, b.v, _CMP_GE_OQ))};
}
inline Mask operator>(F32 a, F32 b) {
  return {_mm256_castps_si256(_mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ))};
}
inline Mask operator==(F32 a, F32 b) {
  return {_mm256_castps_si256(_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ))};
}
inline Mask is_nan(F32 a, F32 b) {
  return {_mm256_castps_si256(_mm256_cmp_ps(a.v, b.v, _CMP_UNORD_Q))};
}
inline F32 select(Mask m, F32 a, F32 b) {
  return {_mm256_blendv_ps(b.v, a.v, _mm256_castsi256_ps(m.v))};
}
// f32((f64(a) - b) - c)
inline F32 subtract_f64(F32 a, double b, double c) {
  const __m256d first = _mm256_set1_pd(b), second = _mm256_set1_pd(c);
  const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(a.v));
  const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(a.v, 1));
  return {_mm256_set_m128(_mm256_cvtpd_ps(_mm256_sub_pd(_mm256_sub_pd(high, first), second)),
                          _mm256_cvtpd_ps(_mm256_sub_pd(_mm256_sub_pd(low, first), second)))};
}
inline F32 approximate_reciprocal(F32 a) { return {_mm256_rcp_ps(a.v)}; }
inline float reduce_max(F32 a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}
// Lane i is added to lane i + half, then halves of that.
inline float reduce_add(F32 a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}

inline U32 load(const uint32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}
inline void store(uint32_t* p, U32 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.v); }
inline U32 splat_u32(uint32_t a) { return {_mm256_set1_epi32(static_cast<int>(a))}; }
inline U32 iota_u32() { return {_mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0)}; }
inline U32 operator+(U32 a, U32 b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline U32 operator^(U32 a, U32 b) { return {_mm256_xor_si256(a.v, b.v)}; }
inline U32 operator&(U32 a, U32 b) { return {_mm256_and_si256(a.v, b.v)}; }
inline U32 operator|(U32 a, U32 b) { return {_mm256_or_si256(a.v, b.v)}; }
template <int N>
inline U32 shift_right(U32 a) {
  return {_mm256_srli_epi32(a.v, N)};
}
inline U32 shift_left_one(U32 n) { return {_mm256_sllv_epi32(_mm256_set1_epi32(1), n.v)}; }
inline U32 sign_mask(U32 a) { return {_mm256_srai_epi32(a.v, 31)}; }
inline Mask operator>=(U32 a, U32 b) {
  return {_mm256_cmpeq_epi32(_mm256_max_epu32(a.v, b.v), a.v)};
}
inline Mask operator==(U32 a, U32 b) { return {_mm256_cmpeq_epi32(a.v, b.v)}; }
inline U32 select(Mask m, U32 a, U32 b) { return {_mm256_blendv_epi8(b.v, a.v, m.v)}; }
inline U32 bit_cast_u32(F32 a) { return {_mm256_castps_si256(a.v)}; }
inline F32 bit_cast_f32(U32 a) { return {_mm256_castsi256_ps(a.v)}; }
// Rounded once, as a conversion of a 32-bit integer is: both halves are exact, the sum is rounded.
inline F32 convert_u32(U32 a) {
  const __m256 low = _mm256_cvtepi32_ps(_mm256_and_si256(a.v, _mm256_set1_epi32(0xffff)));
  const __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(a.v, 16));
  return {_mm256_add_ps(_mm256_mul_ps(high, _mm256_set1_ps(65536.0f)), low)};
}

// 64-bit lanes: the even 32-bit lanes of a vector are their low halves.
struct U64 {
  __m256i v;
};
inline U64 even_lanes(U32 a) {
  return {a.v};
}  // the high halves are left as they are: multiply_low ignores them
inline U64 odd_lanes(U32 a) { return {_mm256_srli_epi64(a.v, 32)}; }
inline U32 merge_lanes(U64 even, U64 odd) {
  return {_mm256_blend_epi32(even.v, _mm256_slli_epi64(odd.v, 32), 0xaa)};
}
inline U64 splat_u64(uint64_t a) { return {_mm256_set1_epi64x(static_cast<long long>(a))}; }
inline U64 multiply_low(U64 a, U64 m) {
  return {_mm256_mul_epu32(a.v, m.v)};
}  // of the low halves, 64 bits
inline U64 operator+(U64 a, U64 b) { return {_mm256_add_epi64(a.v, b.v)}; }
inline void store(uint64_t* p, U64 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.v); }
inline U64 high_half(U64 a) { return {_mm256_srli_epi64(a.v, 32)}; }
inline U64 xor3(U64 a, U64 b, U64 c) { return {_mm256_xor_si256(_mm256_xor_si256(a.v, b.v), c.v)}; }

inline U32 order4() { return {_mm256_set_epi32(7, 5, 3, 1, 6, 4, 2, 0)}; }
inline void transpose4(U32 (&w)[4]) {
  const __m256i a = _mm256_unpacklo_epi32(w[0].v, w[1].v),
                b = _mm256_unpackhi_epi32(w[0].v, w[1].v);
  const __m256i c = _mm256_unpacklo_epi32(w[2].v, w[3].v),
                d = _mm256_unpackhi_epi32(w[2].v, w[3].v);
  w[0].v = _mm256_unpacklo_epi64(a, c);
  w[1].v = _mm256_unpackhi_epi64(a, c);
  w[2].v = _mm256_unpacklo_epi64(b, d);
  w[3].v = _mm256_unpackhi_epi64(b, d);
}

inline uint32_t bits(Mask m) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(m.v)));
}
inline Mask operator_or(Mask a, Mask b) { return {_mm256_or_si256(a.v, b.v)}; }
inline int count(uint32_t mask_bits) { return __builtin_popcount(mask_bits); }

// The lane numbers of the set bits of mask, packed to the front: pext of the nibbles 0..7.
inline __m256i compress_order(uint32_t mask) {
  const uint64_t bytes = _pdep_u64(mask, 0x0101010101010101ull) * 0xff;
  const uint64_t order = _pext_u64(0x0706050403020100ull, bytes);
  return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(order)));
}
inline void compress_store(float* p, uint32_t mask, F32 a) {
  _mm256_storeu_ps(p, _mm256_permutevar8x32_ps(a.v, compress_order(mask)));
}
inline void compress_store(uint32_t* p, uint32_t mask, U32 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm256_permutevar8x32_epi32(a.v, compress_order(mask)));
}
inline void compress_store(uint64_t* p, uint32_t mask, const uint64_t* from) {
  for (int i = 0; i < kLanes; ++i) {
    *p = from[i];
    p += mask >> i & 1;
  }
}

class MassSum {
 public:
  void add(F32 a) {
    even_ = _mm256_add_epi64(even_, even_mass(a));
    odd_ = _mm256_add_epi64(odd_, odd_mass(a));
  }
  void add(F32 a, Mask m, MassSum* masked) {
    const __m256i even = even_mass(a), odd = odd_mass(a);
    even_ = _mm256_add_epi64(even_, even);
    odd_ = _mm256_add_epi64(odd_, odd);
    const __m256i even_mask = _mm256_shuffle_epi32(m.v, 0xa0),
                  odd_mask = _mm256_shuffle_epi32(m.v, 0xf5);
    masked->even_ = _mm256_add_epi64(masked->even_, _mm256_and_si256(even, even_mask));
    masked->odd_ = _mm256_add_epi64(masked->odd_, _mm256_and_si256(odd, odd_mask));
  }
  void add(const uint64_t* p, Mask m) {
    const __m256i low_mask = _mm256_cvtepi32_epi64(_mm256_castsi256_si128(m.v));
    const __m256i high_mask = _mm256_cvtepi32_epi64(_mm256_extracti128_si256(m.v, 1));
    const __m256i* q = reinterpret_cast<const __m256i*>(p);
    even_ = _mm256_add_epi64(even_, _mm256_and_si256(_mm256_loadu_si256(q), low_mask));
    odd_ = _mm256_add_epi64(odd_, _mm256_and_si256(_mm256_loadu_si256(q + 1), high_mask));
  }
  uint64_t total() const {
    alignas(32) uint64_t lane[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lane), _mm256_add_epi64(even_, odd_));
    return lane[0] + lane[1] + lane[2] + lane[3];
  }
  static void store_masses(uint64_t* p, F32 a) {
    const __m256i even = even_mass(a), odd = odd_mass(a);
    const __m256i low = _mm256_unpacklo_epi64(even, odd), high = _mm256_unpackhi_epi64(even, odd);
    __m256i* q = reinterpret_cast<__m256i*>(p);
    _mm256_storeu_si256(q, _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_storeu_si256(q + 1, _mm256_permute2x128_si256(low, high, 0x31));
  }

 private:
  // floor(a) of every other lane. a = mantissa * 2^(field - 150), so floor(a) = (mantissa << 32) >>
  // (182 - field); a < 2^55 keeps the count positive, a count of 64 or more gives 0.
  static __m256i mass(__m256i mantissa_high, __m256i exponent_field) {
    return _mm256_srlv_epi64(mantissa_high,
                             _mm256_sub_epi64(_mm256_set1_epi64x(182), exponent_field));
  }
  static __m256i mantissa(F32 a) {
    const __m256i fraction =
        _mm256_and_si256(_mm256_castps_si256(a.v), _mm256_set1_epi32(0x7fffff));
    return _mm256_or_si256(fraction, _mm256_set1_epi32(0x800000));
  }
  static __m256i even_mass(F32 a) {
    const __m256i field = _mm256_srli_epi32(_mm256_castps_si256(a.v), 23);
    return mass(_mm256_slli_epi64(mantissa(a), 32),
                _mm256_and_si256(field, _mm256_set1_epi64x(0xffffffff)));
  }
  static __m256i odd_mass(F32 a) {
    const __m256i field = _mm256_srli_epi32(_mm256_castps_si256(a.v), 23);
    const __m256i high = _mm256_and_si256(
        mantissa(a), _mm256_set1_epi64x(static_cast<long long>(0xffffffff00000000ull)));
    return mass(high, _mm256_srli_epi64(field, 32));
  }
  __m256i even_ = _mm256_setzero_si256(), odd_ = _mm256_setzero_si256();
};

}  // namespace lmdecode::LMD_SIMD
