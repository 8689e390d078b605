// panel_product() of tile_product.h for the 16 rows of a strip, by tiles of the matrix units: A and
// B lie as there, in bfloat16, their depth padded to whole tiles of 16 pairs. Each element of A B
// starts from 0; simd/matrix_tiles.h has the order of its sum, which does not depend on the columns
// and rows beside it.
#pragma once

#include "attention/tile_product.h"
#include "simd/matrix_tiles.h"

namespace lmdecode::LMD_SIMD::attention {

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
