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

inline void store_all(float* p, F32 a) { store(p, a); }
#if defined(LMD_SIMD_AVX512)
inline void store_all(BFloat16* p, F32 a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(
      _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
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

}  // namespace lmdecode::LMD_SIMD
