// Which elements of a block of a row reach a bound. A kernel header: see simd/vec.h.
#pragma once

#include "simd/vec.h"

namespace lmdecode::LMD_SIMD::sampling {

constexpr int kBlock = 64;  // elements a step; one word of mask bits
constexpr int kBlockVectors = kBlock / kLanes;

template <class T>
class BlockBound {
 public:
  explicit BlockBound(float bound) : bound_(splat(bound)) {}

  // Bit i of word[b]: x[b * kBlock + i] >= bound. Whether there is NaN.
  bool scan(const T* x, int blocks, uint64_t* word) const {
    uint32_t nan = 0;
    for (int b = 0; b < blocks; ++b, x += kBlock) {
      F32 a[kBlockVectors];
      for (int j = 0; j < kBlockVectors; ++j) a[j] = load(x + j * kLanes);
      Mask unordered = is_nan(a[0], a[1]);
      for (int j = 2; j < kBlockVectors; j += 2)
        unordered = operator_or(unordered, is_nan(a[j], a[j + 1]));
      nan |= bits(unordered);
      uint64_t w = 0;
      for (int j = 0; j < kBlockVectors; ++j) {
        w |= static_cast<uint64_t>(bits(a[j] >= bound_)) << (j * kLanes);
      }
      word[b] = w;
    }
    return nan != 0;
  }

 private:
  F32 bound_;
};

#if defined(LMD_SIMD_AVX512)
// 16-bit integers, 32 a vector: bf16 numbers above zero are ordered as their bits are, those below
// zero the other way round.
template <>
class BlockBound<BFloat16> {
 public:
  explicit BlockBound(float bound) {
    // The least bf16 >= bound. -0 stands for both zeros.
    const uint32_t bits = bound == 0.0f ? 0x80000000u : bits_of(bound);
    const bool is_positive = bits < 0x80000000u;
    const uint32_t least = is_positive ? (bits + 0xffffu) >> 16 : bits >> 16;
    // x ^ flip >= least ^ flip, unsigned: where the bound is above zero, numbers below it come
    // first; else the largest magnitude below zero does, and those above zero last.
    const uint32_t flip = is_positive ? 0x8000u : 0xffffu;
    flip_ = _mm512_set1_epi16(static_cast<short>(flip));
    least_ = _mm512_set1_epi16(static_cast<short>(least ^ flip));
  }

  bool scan(const BFloat16* x, int blocks, uint64_t* word) const {
    const __m512i infinity = _mm512_set1_epi16(0x7f80);
    __m512i largest[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int b = 0; b < blocks; ++b) {
      const __m512i half[2] = {_mm512_loadu_si512(x + b * kBlock),
                               _mm512_loadu_si512(x + b * kBlock + kBlock / 2)};
      for (int h = 0; h < 2; ++h) largest[h] = _mm512_max_epu16(largest[h], magnitude(half[h]));
      word[b] = reached(half[0]) | reached(half[1]) << 32;
    }
    const __m512i all = _mm512_max_epu16(largest[0], largest[1]);
    if (_mm512_cmpgt_epu16_mask(all, infinity) == 0) return false;
    for (int b = 0; b < blocks * 2; ++b) {  // NaN reaches nothing
      const __m512i half = magnitude(_mm512_loadu_si512(x + b * (kBlock / 2)));
      const uint64_t nan = _mm512_cmpgt_epu16_mask(half, infinity);
      word[b / 2] &= ~(nan << (b % 2 * 32));
    }
    return true;
  }

 private:
  static __m512i magnitude(__m512i x) { return _mm512_and_si512(x, _mm512_set1_epi16(0x7fff)); }
  uint64_t reached(__m512i x) const {
    return _mm512_cmpge_epu16_mask(_mm512_xor_si512(x, flip_), least_);
  }

  __m512i flip_, least_;
};
#endif

}  // namespace lmdecode::LMD_SIMD::sampling
