// The products of int4: weights of four bits, 0 to 15, in groups along the depth that have a scale
// each. One step along the depth of a panel is a group:
//
//   scales   [width] float16
//   zeros    [width] bytes, where the weights have them: what counts as 0; else 8 does
//   nibbles  [kGroup / 8, width, 4]: byte b of step s holds element 8 s + b of the group in its low
//            half, element 8 s + 4 + b in its high half
//
// and of a row of x:
//
//   scale    f32, of this group of this row
//   offset   int32: -8 times the sum of the elements, or -1 times, where the weights have zeros
//   elements int8 [kGroup]
//
// The sum of the products of a group, and of its offset, is exact; float(sum) * (scale of the
// weights * scale of x) is added to the sum of the groups before it by a fused operation. So the
// bits are the same at every level.
#pragma once

#include "linear/linear_products.h"

namespace lmdecode::LMD_SIMD::linear {

using namespace lmdecode::linear;

constexpr int kGroupPart = 32;  // elements whose products fit 16 bits: 16 * 15 * 127 in each lane

inline int32_t load_quad(const char* p) {
  int32_t quad;
  __builtin_memcpy(&quad, p, sizeof(quad));
  return quad;
}

// Floats of GroupVectors, where these are wide.
#if defined(LMD_SIMD_AVX512) || defined(LMD_SIMD_AVX2)
struct GroupFloats {
  using Floats = F32;
  static constexpr int kLanes = LMD_SIMD::kLanes;
  static Floats load_scales(const char* p) { return load(reinterpret_cast<const Half*>(p)); }
  static Floats load_floats(const float* p) { return load(p); }
  static void store_floats(float* p, Floats a) { store(p, a); }
  static Floats same(float a) { return splat(a); }
  static Floats times(Floats a, Floats b) { return a * b; }
  static Floats add_product(Floats a, Floats b, Floats c) { return multiply_add(a, b, c); }
};
#endif

// Vectors of kLanes outputs. Bytes: four weights of each. Part: sums of up to kGroupPart elements,
// which begin() makes of the sum so far and end() adds to it.
#if defined(LMD_SIMD_AVX512)
struct GroupVectors : GroupFloats {
  using Bytes = __m512i;
  using Sum = __m512i;
  using Part = __m512i;
  static Bytes load_bytes(const char* p) {
    Bytes v = _mm512_loadu_si512(p);
    asm("" : "+v"(v));  // loaded once: the compiler would load it for each half
    return v;
  }
  static Bytes low(Bytes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
  static Bytes high(Bytes v) { return low(_mm512_srli_epi16(v, 4)); }
  static Sum offset(int32_t x) { return _mm512_set1_epi32(x); }
  static Sum offset(int32_t x, const char* zeros) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros));
    return _mm512_mullo_epi32(_mm512_cvtepu8_epi32(bytes), _mm512_set1_epi32(x));
  }
#if defined(LMD_SIMD_AVX512_VNNI)
  static Part begin(Sum sum) { return sum; }
  static Part add(Part c, Bytes w, const char* x) {
    return _mm512_dpbusd_epi32(c, w, _mm512_set1_epi32(load_quad(x)));
  }
  static Sum end(Part c, Sum) { return c; }
#else
  static Part begin(Sum) { return _mm512_setzero_si512(); }
  static Part add(Part c, Bytes w, const char* x) {
    return _mm512_add_epi16(c, _mm512_maddubs_epi16(w, _mm512_set1_epi32(load_quad(x))));
  }
  static Sum end(Part c, Sum sum) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(c, _mm512_set1_epi16(1)));
  }
#endif
  static Floats to_floats(Sum sum) { return {_mm512_cvtepi32_ps(sum)}; }
};
#elif defined(LMD_SIMD_AVX2)
struct GroupVectors : GroupFloats {
  using Bytes = __m256i;
  using Sum = __m256i;
  using Part = __m256i;
  static Bytes load_bytes(const char* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static Bytes low(Bytes v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
  static Bytes high(Bytes v) { return low(_mm256_srli_epi16(v, 4)); }
  static Sum offset(int32_t x) { return _mm256_set1_epi32(x); }
  static Sum offset(int32_t x, const char* zeros) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(zeros));
    return _mm256_mullo_epi32(_mm256_cvtepu8_epi32(bytes), _mm256_set1_epi32(x));
  }
  static Part begin(Sum) { return _mm256_setzero_si256(); }
  static Part add(Part c, Bytes w, const char* x) {
    return _mm256_add_epi16(c, _mm256_maddubs_epi16(w, _mm256_set1_epi32(load_quad(x))));
  }
  static Sum end(Part c, Sum sum) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(c, _mm256_set1_epi16(1)));
  }
  static Floats to_floats(Sum sum) { return {_mm256_cvtepi32_ps(sum)}; }
};
#else
typedef uint32_t Uint4 __attribute__((vector_size(16)));
typedef int16_t Short8 __attribute__((vector_size(16)));

struct GroupVectors {
  using Bytes = Uint4;
  using Sum = Int4;
  using Part = Short8;
  using Floats = Float4;
  static constexpr int kLanes = 4;
  static Bytes load_bytes(const char* p) {
    Bytes v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
  }
  static Bytes low(Bytes v) { return v & 0x0f0f0f0fu; }
  static Bytes high(Bytes v) { return v >> 4 & 0x0f0f0f0fu; }
  static Sum offset(int32_t x) { return Sum{x, x, x, x}; }
  static Sum offset(int32_t x, const char* zeros) {
    uint8_t z[4];
    __builtin_memcpy(z, zeros, sizeof(z));
    return Sum{z[0] * x, z[1] * x, z[2] * x, z[3] * x};
  }
  static Part begin(Sum) { return Part{}; }
  static Part add(Part c, Bytes w, const char* x) {
    // Elements 0 and 2 of each output lie in halves of 16 bits, so do 1 and 3.
    int8_t e[4];
    __builtin_memcpy(e, x, sizeof(e));
    const int16_t x0 = e[0], x1 = e[1], x2 = e[2], x3 = e[3];
    const Bytes even = w & 0x00ff00ffu, odd = w >> 8 & 0x00ff00ffu;
    return c + reinterpret_cast<Part>(even) * Part{x0, x2, x0, x2, x0, x2, x0, x2} +
           reinterpret_cast<Part>(odd) * Part{x1, x3, x1, x3, x1, x3, x1, x3};
  }
  static Sum end(Part c, Sum sum) {
    const Sum pairs = reinterpret_cast<Sum>(c);
    return sum + (pairs << 16 >> 16) + (pairs >> 16);
  }
  static Floats to_floats(Sum sum) { return __builtin_convertvector(sum, Floats); }
  static Floats load_scales(const char* p) {
    Half h[4];
    __builtin_memcpy(h, p, sizeof(h));
    return Floats{to_float(h[0]), to_float(h[1]), to_float(h[2]), to_float(h[3])};
  }
  static Floats load_floats(const float* p) { return FloatSums::load_sum(p); }
  static void store_floats(float* p, Floats a) { FloatSums::store_sum(p, a); }
  static Floats same(float a) { return Floats{a, a, a, a}; }
  static Floats times(Floats a, Floats b) { return a * b; }
  static Floats add_product(Floats a, Floats b, Floats c) {
    for (int i = 0; i < kLanes; ++i) c[i] = fused_multiply_add(a[i], b[i], c[i]);
    return c;
  }
};
#endif

template <int kGroupSize, bool kZeros>
struct GroupProducts : GroupVectors {
  using Scalar = float;
  static constexpr bool kHasZeros = kZeros;
  static constexpr int kGroup = kGroupSize;
  static constexpr int kWidth = kPanelVectors * kLanes;
  static constexpr int kNibblesAt = kWidth * (kZeros ? 3 : 2);
  static constexpr int kStepBytes = kNibblesAt + kWidth * kGroup / 2;
  static constexpr int kInputBytes = 8 + kGroup;
  static constexpr int32_t kOffsetFactor = kZeros ? -1 : -8;
};

struct GroupInput {
  float scale;
  int32_t offset;
};

}  // namespace lmdecode::LMD_SIMD::linear
