// Vector helpers of attention beside csrc/simd: transposes, interleaves and divides rows.
#pragma once

#include "simd/vec_math.h"
#include "simd/vec_round.h"

namespace lmdecode::LMD_SIMD::attention {

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

#if defined(LMD_SIMD_AVX512)
// Elements of two rows, by turns of a and b: the first 16 and the last 16 of 32.
inline void interleave_pairs(__m512i a, __m512i b, __m512i* first, __m512i* last) {
  const __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
  *first = _mm512_permutex2var_epi64(low, _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), high);
  *last = _mm512_permutex2var_epi64(low, _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4), high);
}
#endif

// p[0 .. size) = from[0 .. size) times a factor that is 1 / divisor.
template <class T>
inline void store_quotient(T* p, const float* from, int64_t size, float divisor) {
  const F32 by = splat(divisor);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store_all(p + i, load(from + i) / by);
  if (i < size)
    store_part(p + i, load_part(from + i, static_cast<int>(size - i), 0.0f) / by, size - i);
}

}  // namespace lmdecode::LMD_SIMD::attention
