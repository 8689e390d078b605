// The products of each format, at the level of this build: the layout along the depth of a panel,
// and how it is multiplied and added.
//
//   kValues         elements of in_features that one step along the depth takes
//   kPhases         passes over the weights of a step, each with its own element of the input
//   kLanes          outputs of a vector of sums; kVectors of them make a panel
//   Input           what a row of x consists of, kPhases a step
//   Weights(p, i)   the weights of one vector in phase i; kWeightBytes apart in a step
#pragma once

#include "linear/packed_layout.h"
#include "simd/vec_math.h"
#include "simd/vec_round.h"

namespace lmdecode::LMD_SIMD::linear {

using namespace lmdecode::linear;

constexpr int kTileRows = 6;

#if defined(LMD_SIMD_AVX512)
constexpr int kPanelVectors = 4;
#else
constexpr int kPanelVectors = 2;
#endif

// Whether weights that follow are fetched. Plain C++ waits for its products, not for memory, and
// is compiled in half the time without.
#if defined(LMD_SIMD_AVX512) || defined(LMD_SIMD_AVX2)
constexpr bool kCanFetch = true;
#else
constexpr bool kCanFetch = false;
#endif

#if defined(LMD_SIMD_AVX512) || defined(LMD_SIMD_AVX2)

struct FloatSums {
  using Sum = F32;
  using Scalar = float;
  static constexpr int kLanes = LMD_SIMD::kLanes;
  static Sum zero() { return splat(0.0f); }
  static Sum load_sum(const float* p) { return load(p); }
  static void store_sum(float* p, Sum a) { store(p, a); }
  static Sum plus(Sum a, Sum b) { return a + b; }
};

struct Floats : FloatSums {
  using Input = float;
  using Weight = F32;
  using Factor = F32;
  static constexpr int kValues = 1, kPhases = 1, kWeightBytes = 4 * kLanes;
  static Weight weight(const char* p, int) { return load(reinterpret_cast<const float*>(p)); }
  static Factor factor(const Input* p) { return splat(*p); }
  static Sum add(Sum c, Factor a, Weight b) { return multiply_add(a, b, c); }
};

#else

// Vectors of the compiler's: it keeps these in registers, and arrays of lanes it does not.
typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));

struct FloatSums {
  using Sum = Float4;
  using Scalar = float;
  static constexpr int kLanes = 4;
  static Sum zero() { return Sum{}; }
  static Sum load_sum(const float* p) {
    Sum v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
  }
  static void store_sum(float* p, Sum a) { __builtin_memcpy(p, &a, sizeof(a)); }
  static Sum plus(Sum a, Sum b) { return a + b; }
};

struct Floats : FloatSums {
  using Input = float;
  using Weight = Float4;
  using Factor = Float4;
  static constexpr int kValues = 1, kPhases = 1, kWeightBytes = 16;
  static Weight weight(const char* p, int) { return load_sum(reinterpret_cast<const float*>(p)); }
  static Factor factor(const Input* p) { return Factor{*p, *p, *p, *p}; }
  static Sum add(Sum c, Factor a, Weight b) { return a * b + c; }
};

#endif

#if defined(LMD_SIMD_AVX2) && !defined(LMD_SIMD_AVX512)
// A mask that is read each time: a register for it would leave too few for the sums of six rows,
// which gcc then keeps in memory (1.2 to 1.4 times as long).
inline __m256i second_halves() {
  static const volatile int64_t mask = static_cast<int64_t>(0xffff0000ffff0000);
  return _mm256_set1_epi64x(mask);
}
#endif

// Pairs of bfloat16 widened to floats, the first of each pair in phase 0. Its inputs are floats
// that were rounded to bfloat16.
struct WidenedPairs : FloatSums {
  using Input = float;
  using Weight = Floats::Weight;
  using Factor = Floats::Factor;
  static constexpr int kValues = 2, kPhases = 2, kWeightBytes = 4 * kLanes;
  static Weight weight(const char* p, int phase) {
#if defined(LMD_SIMD_AVX512)
    const __m512i pairs = _mm512_loadu_si512(p);
    return {_mm512_castsi512_ps(phase == 0 ? _mm512_slli_epi32(pairs, 16)
                                           : _mm512_and_si512(pairs, _mm512_set1_epi32(-0x10000)))};
#elif defined(LMD_SIMD_AVX2)
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm256_castsi256_ps(phase == 0 ? _mm256_slli_epi32(pairs, 16)
                                           : _mm256_and_si256(pairs, second_halves()))};
#else
    Int4 pairs;
    __builtin_memcpy(&pairs, p, sizeof(pairs));
    pairs = phase == 0 ? pairs << 16 : pairs & -0x10000;
    Weight v;
    __builtin_memcpy(&v, &pairs, sizeof(v));
    return v;
#endif
  }
  static Factor factor(const Input* p) { return Floats::factor(p); }
  static Sum add(Sum c, Factor a, Weight b) { return Floats::add(c, a, b); }
};

#if defined(LMD_SIMD_AVX512_BF16)
// Pairs of bfloat16, multiplied and added together.
struct BFloat16Pairs : FloatSums {
  using Input = uint32_t;
  using Weight = __m512bh;
  using Factor = __m512bh;
  static constexpr int kValues = 2, kPhases = 1, kWeightBytes = 64;
  static Weight weight(const char* p, int) {
    return reinterpret_cast<Weight>(_mm512_loadu_si512(p));
  }
  static Factor factor(const Input* p) {
    return reinterpret_cast<Factor>(_mm512_set1_epi32(static_cast<int>(*p)));
  }
  static Sum add(Sum c, Factor a, Weight b) { return {_mm512_dpbf16_ps(c.v, a, b)}; }
};
#endif

// Pairs of int8, widened to 16 bits: the sum of two products is exact in 32 bits, where pmaddubsw
// would saturate. Inputs are pairs of 16 bits.
struct Int8Pairs {
  using Scalar = int32_t;
  using Input = uint32_t;
  static constexpr int kValues = 2, kPhases = 1;
  static constexpr int32_t kInputOffset = int8_input_offset(kValues);
#if defined(LMD_SIMD_AVX512)
  using Sum = __m512i;
  using Weight = __m512i;
  using Factor = __m512i;
  static constexpr int kLanes = 16, kWeightBytes = 32;
  static Sum zero() { return _mm512_setzero_si512(); }
  static Sum load_sum(const int32_t* p) { return _mm512_loadu_si512(p); }
  static void store_sum(int32_t* p, Sum a) { _mm512_storeu_si512(p, a); }
  static Sum plus(Sum a, Sum b) { return _mm512_add_epi32(a, b); }
  static Weight weight(const char* p, int) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Factor factor(const Input* p) { return _mm512_set1_epi32(static_cast<int>(*p)); }
  static Sum add(Sum c, Factor a, Weight b) { return _mm512_add_epi32(c, _mm512_madd_epi16(a, b)); }
#elif defined(LMD_SIMD_AVX2)
  using Sum = __m256i;
  using Weight = __m256i;
  using Factor = __m256i;
  static constexpr int kLanes = 8, kWeightBytes = 16;
  static Sum zero() { return _mm256_setzero_si256(); }
  static Sum load_sum(const int32_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static void store_sum(int32_t* p, Sum a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a);
  }
  static Sum plus(Sum a, Sum b) { return _mm256_add_epi32(a, b); }
  static Weight weight(const char* p, int) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Factor factor(const Input* p) { return _mm256_set1_epi32(static_cast<int>(*p)); }
  static Sum add(Sum c, Factor a, Weight b) { return _mm256_add_epi32(c, _mm256_madd_epi16(a, b)); }
#else
  using Sum = Int4;
  struct Weight {
    Int4 first, second;
  };
  using Factor = Weight;
  static constexpr int kLanes = 4, kWeightBytes = 8;
  static Sum zero() { return Sum{}; }
  static Sum load_sum(const int32_t* p) {
    Sum v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
  }
  static void store_sum(int32_t* p, Sum a) { __builtin_memcpy(p, &a, sizeof(a)); }
  static Sum plus(Sum a, Sum b) { return a + b; }
  static Weight weight(const char* p, int) {
    int8_t w[8];
    __builtin_memcpy(w, p, sizeof(w));
    return {Int4{w[0], w[2], w[4], w[6]}, Int4{w[1], w[3], w[5], w[7]}};
  }
  static Factor factor(const Input* p) {
    const int32_t first = static_cast<int16_t>(*p & 0xffffu);
    const int32_t second = static_cast<int16_t>(*p >> 16);
    return {Int4{first, first, first, first}, Int4{second, second, second, second}};
  }
  static Sum add(Sum c, Factor a, Weight b) { return c + a.first * b.first + a.second * b.second; }
#endif
};

#if defined(LMD_SIMD_AVX512_VNNI)
// Quads of int8, multiplied and added together. The instruction takes one factor without sign:
// inputs are raised by 128, and each sum is then too large by 128 times the sum of its weights.
struct Int8Quads {
  using Scalar = int32_t;
  using Input = uint32_t;
  using Sum = __m512i;
  using Weight = __m512i;
  using Factor = __m512i;
  static constexpr int kValues = 4, kPhases = 1, kLanes = 16, kWeightBytes = 64;
  static constexpr int32_t kInputOffset = int8_input_offset(kValues);
  static Sum zero() { return _mm512_setzero_si512(); }
  static Sum load_sum(const int32_t* p) { return _mm512_loadu_si512(p); }
  static void store_sum(int32_t* p, Sum a) { _mm512_storeu_si512(p, a); }
  static Sum plus(Sum a, Sum b) { return _mm512_add_epi32(a, b); }
  static Weight weight(const char* p, int) { return _mm512_loadu_si512(p); }
  static Factor factor(const Input* p) { return _mm512_set1_epi32(static_cast<int>(*p)); }
  static Sum add(Sum c, Factor a, Weight b) { return _mm512_dpbusd_epi32(c, a, b); }
};
#endif

}  // namespace lmdecode::LMD_SIMD::linear
