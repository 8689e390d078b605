// Vectors to memory, rounded to the half types: to nearest, ties to even.
#pragma once

#include "common/half_round.h"
#include "simd/vec.h"

namespace lmdecode::LMD_SIMD {

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

// The nearest bfloat16 in the upper half of each lane, anything in the lower one.
inline U32 bfloat16_above(F32 value) {
  const U32 bits = bit_cast_u32(value), odd = shift_right<16>(bits) & splat_u32(1);
  return select(is_nan(value, value), bits | splat_u32(0x400000u), bits + splat_u32(0x7fffu) + odd);
}

// The nearest number that bfloat16 holds.
inline F32 round_to_bfloat16(F32 value) {
  return bit_cast_f32(bfloat16_above(value) & splat_u32(0xffff0000u));
}

inline void store_all(float* p, F32 a) { store(p, a); }
#if defined(LMD_SIMD_AVX512)
inline void store_all(BFloat16* p, F32 a) {
  const U32 bits = shift_right<16>(bfloat16_above(a));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(bits.v));
}
inline void store_all(Half* p, F32 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif defined(LMD_SIMD_AVX2)
inline void store_all(BFloat16* p, F32 a) {
  const __m256i bits = shift_right<16>(bfloat16_above(a)).v;
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(p),
      _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)));
}
inline void store_all(Half* p, F32 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#else
inline void store_all(BFloat16* p, F32 a) { store_part(p, a, kLanes); }
inline void store_all(Half* p, F32 a) { store_part(p, a, kLanes); }
#endif

}  // namespace lmdecode::LMD_SIMD
