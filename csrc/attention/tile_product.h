// C (+)= A B for the six rows of a strip: the inner loop of attention. By tiles of the matrix units
// a strip has 16 rows (multiply_strip, below).
//
// A [6, depth] has its rows apart; B [depth, kPanelWidth] is packed, its rows side by side; C [6,
// columns] is f32. An element of A and B is a float, or two bfloat16 numbers that are multiplied
// and added together (BFloat16Pairs). Each element of A B is one chain of additions in the order of
// the depth, independent of the columns and rows beside it, and is added to C at the end: a chain
// that starts from C would accumulate the rounding errors of all steps. Callers keep chains short,
// too.
#pragma once

#include "attention/attention_vec.h"
#include "simd/matrix_tiles.h"

namespace lmdecode::LMD_SIMD::attention {

#if defined(LMD_SIMD_AVX512_AMX)
constexpr int kTileRowCount = 16;
#else
constexpr int kTileRowCount = 6;
#endif
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
  static constexpr int kDepthUnit = 1;
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
  static constexpr int kDepthUnit = 1;
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
  static constexpr int kDepthUnit = 1;  // elements of a depth are padded to
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
  requires(Dot::kDepthUnit == 1)
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

// panel_product() of tile_product.h for the 16 rows of a strip, by tiles of the matrix units: A and
// B lie as there, in bfloat16, their depth padded to whole tiles of 16 pairs. Each element of A B
// starts from 0; simd/matrix_tiles.h has the order of its sum, which does not depend on the columns
// and rows beside it.

#if defined(LMD_SIMD_AVX512_AMX)

struct TilePairs : BFloat16Pairs {
  static constexpr int kDepthUnit = 16;
};

// a: register 4, b: 6 and 7, c: 0 to 3.
inline TileConfig matrix_product_config() {
  TileConfig config;
  for (int tile = 0; tile < kTileRegisters; ++tile) {
    config.set(tile, kMatrixTileRows, kMatrixTileBytes);
  }
  return config;
}

// c [16, 16 kTiles] = A B.
template <int kTiles>
inline void multiply_strip(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t depth,
                           float* c, int64_t c_stride) {
  constexpr int64_t kStride = 4 * kPanelWidth;
  const auto each = [](const auto& visit) __attribute__((always_inline)) {
    visit.template operator()<0>();
    if constexpr (kTiles > 1) visit.template operator()<1>();
    if constexpr (kTiles > 2) visit.template operator()<2>();
    if constexpr (kTiles > 3) visit.template operator()<3>();
  };
  each([]<int kTile>() { zero_tile<kTile>(); });
  for (int64_t k = 0; k < depth; k += TilePairs::kDepthUnit) {
    load_tile<4>(a + k, 4 * a_stride);
    each([&]<int kTile>() {
      load_tile<6 + kTile % 2>(b + k * kPanelWidth + kTile * kMatrixTileColumns, kStride);
      multiply_bfloat16<kTile, 4, 6 + kTile % 2>();
    });
  }
  each([&]<int kTile>() { store_tile<kTile>(c + kTile * kMatrixTileColumns, 4 * c_stride); });
}

// columns: a multiple of 16, at most kPanelWidth.
template <class Dot, bool kAdd>
  requires(Dot::kDepthUnit > 1)
inline void panel_product(const typename Dot::Element* a, int64_t a_stride,
                          const typename Dot::Element* b, int64_t depth, float* c, int64_t c_stride,
                          int64_t columns) {
  alignas(64) float sums[kTileRowCount * kPanelWidth];
  float* const to = kAdd ? sums : c;
  const int64_t to_stride = kAdd ? kPanelWidth : c_stride;
  switch (columns / kMatrixTileColumns) {
    case 1:
      multiply_strip<1>(a, a_stride, b, depth, to, to_stride);
      break;
    case 2:
      multiply_strip<2>(a, a_stride, b, depth, to, to_stride);
      break;
    case 3:
      multiply_strip<3>(a, a_stride, b, depth, to, to_stride);
      break;
    default:
      multiply_strip<4>(a, a_stride, b, depth, to, to_stride);
  }
  if constexpr (kAdd) {
    for (int r = 0; r < kTileRowCount; ++r) {
      for (int64_t at = 0; at < columns; at += kLanes) {
        float* const place = c + r * c_stride + at;
        store(place, load(place) + load(sums + r * kPanelWidth + at));
      }
    }
  }
}

#endif

}  // namespace lmdecode::LMD_SIMD::attention
