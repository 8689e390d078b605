// C (+)= A B for the six rows of a strip: the inner loop of attention without matrix units.
//
// A [6, depth] has its rows apart; B [depth, kPanelWidth] is packed, its rows side by side; C [6,
// columns] is f32. An element of A and B is a float, or two bfloat16 numbers that are multiplied
// and added together (BFloat16Pairs). Each element of A B is one chain of additions in the order of
// the depth, independent of the columns and rows beside it, and is added to C at the end: a chain
// that starts from C would accumulate the rounding errors of all steps. Callers keep chains short,
// too.
#pragma once

#include "attention/attention_vec.h"

namespace lmdecode::LMD_SIMD::attention {

constexpr int kTileRowCount = 6;
constexpr int64_t kPanelWidth = 64;

#if defined(LMD_SIMD_AVX512) || defined(LMD_SIMD_AVX2)
constexpr bool kHasFusedProducts = true;
#if defined(LMD_SIMD_AVX512)
constexpr int kTileVectors = 4;
#else
constexpr int kTileVectors = 2;
#endif

struct Floats {
  using Element = float;
  using Vector = F32;
  static constexpr int kVectorLanes = kLanes;
  static constexpr int kPerElement = 1;
  static Vector b(const float* p) { return load(p); }
  static Vector a(const float* p) { return splat(*p); }
  static F32 add(F32 c, Vector a, Vector b) { return multiply_add(a, b, c); }
  static F32 c(const float* p) { return load(p); }
  static void put(float* p, F32 c) { store(p, c); }
  static F32 zero() { return splat(0.0f); }
};
#else
constexpr bool kHasFusedProducts = false;
// Vectors of the compiler's: it keeps these in registers, and arrays of lanes it does not.
constexpr int kTileVectors = 2;

struct Floats {
  using Element = float;
  using Vector = float __attribute__((vector_size(16)));
  static constexpr int kVectorLanes = 4;
  static constexpr int kPerElement = 1;
  static Vector b(const float* p) {
    Vector v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
  }
  static Vector a(const float* p) { return Vector{*p, *p, *p, *p}; }
  static Vector add(Vector c, Vector a, Vector b) { return a * b + c; }
  static Vector c(const float* p) { return b(p); }
  static void put(float* p, Vector c) { __builtin_memcpy(p, &c, sizeof(c)); }
  static Vector zero() { return Vector{}; }
};
#endif

#if defined(LMD_SIMD_AVX512_BF16)
struct BFloat16Pairs {
  using Element = uint32_t;
  using Vector = __m512bh;
  static constexpr int kVectorLanes = 16;
  static constexpr int kPerElement = 2;
  static Vector b(const uint32_t* p) { return reinterpret_cast<Vector>(_mm512_loadu_si512(p)); }
  static Vector a(const uint32_t* p) {
    return reinterpret_cast<Vector>(_mm512_set1_epi32(static_cast<int>(*p)));
  }
  static F32 add(F32 c, Vector a, Vector b) { return {_mm512_dpbf16_ps(c.v, a, b)}; }
  static F32 c(const float* p) { return load(p); }
  static void put(float* p, F32 c) { store(p, c); }
  static F32 zero() { return splat(0.0f); }
};
#endif

template <class Dot, int kVectors, bool kAdd>
inline void tile_product(const typename Dot::Element* a, int64_t a_stride,
                         const typename Dot::Element* b, int64_t depth, float* c,
                         int64_t c_stride) {
  using Sum = decltype(Dot::zero());
  constexpr int kRows = kTileRowCount;
  Sum sum[kRows][kVectors];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) sum[r][j] = Dot::zero();
  }
  for (int64_t i = 0; i < depth; ++i) {
    typename Dot::Vector row[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) row[j] = Dot::b(b + j * Dot::kVectorLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const typename Dot::Vector factor = Dot::a(a + r * a_stride + i);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[r][j] = Dot::add(sum[r][j], factor, row[j]);
    }
    b += kPanelWidth;
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      float* to = c + r * c_stride + j * Dot::kVectorLanes;
      Dot::put(to, kAdd ? Dot::c(to) + sum[r][j] : sum[r][j]);
    }
  }
}

// The columns [0, columns) of one panel; columns is a multiple of 8, at most kPanelWidth.
template <class Dot, bool kAdd>
inline void panel_product(const typename Dot::Element* a, int64_t a_stride,
                          const typename Dot::Element* b, int64_t depth, float* c, int64_t c_stride,
                          int64_t columns) {
  constexpr int64_t kLanesOf = Dot::kVectorLanes;
  int64_t at = 0;
  for (; at + kTileVectors * kLanesOf <= columns; at += kTileVectors * kLanesOf) {
    tile_product<Dot, kTileVectors, kAdd>(a, a_stride, b + at, depth, c + at, c_stride);
  }
  switch ((columns - at + kLanesOf - 1) / kLanesOf) {
    case 3:
      if constexpr (kTileVectors > 3) {
        tile_product<Dot, 3, kAdd>(a, a_stride, b + at, depth, c + at, c_stride);
      }
      break;
    case 2:
      if constexpr (kTileVectors > 2) {
        tile_product<Dot, 2, kAdd>(a, a_stride, b + at, depth, c + at, c_stride);
      }
      break;
    case 1:
      tile_product<Dot, 1, kAdd>(a, a_stride, b + at, depth, c + at, c_stride);
      break;
    default:
      break;
  }
}

}  // namespace lmdecode::LMD_SIMD::attention
