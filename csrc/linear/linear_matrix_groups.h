// Sums of a block of rows and a panel with groups, by tiles of the matrix units: the codes of a
// group become the bytes of tiles once for all rows, their products are exact, and scales are
// applied in the order of linear_group_tiles.h: the same bits.
#pragma once

#include "linear/linear_group_products.h"
#include "linear/linear_matrix_tiles.h"

#if defined(LMD_SIMD_AVX512_AMX)

namespace lmdecode::LMD_SIMD::linear {

using namespace lmdecode::linear;

// Elements of a group in one product of tiles.
template <class Dot>
constexpr int kGroupTileBytes = Dot::kGroup < 64 ? Dot::kGroup : 64;

// a: register 4, b: 6 and 7, c: 0 to 3.
template <class Dot>
inline TileConfig group_tile_config(const RowTiles& tiles) {
  TileConfig config;
  for (int tile = 0; tile < 4; ++tile) config.set(tile, tiles.height, kMatrixTileBytes);
  config.set(4, tiles.height, kGroupTileBytes<Dot>);
  for (int tile = 6; tile < 8; ++tile) config.set(tile, kGroupTileBytes<Dot> / 4, kMatrixTileBytes);
  return config;
}

// sums [rows, 64] += `steps` steps, the weights of which begin at `weights`, and the inputs of the
// rows at `input_at`; from 0, if first.
template <class Dot>
void add_groups_by_tiles(const LinearInput& input, const RowTiles& tiles, int64_t input_at,
                         const char* weights, int64_t steps, bool is_first, float* sums) {
  static_assert(Dot::kWidth == kMaxPanelWidth && kPanelVectors == 4);
  if (is_first) {
    __builtin_memset(sums, 0, static_cast<size_t>(input.count * Dot::kWidth) * sizeof(float));
  }
  alignas(64) char unpacked[Dot::kGroup * Dot::kWidth];
  alignas(64) int32_t products[kMatrixTileRows * Dot::kWidth];
  const auto add_group = [&](const char* step, const char* group, int64_t at) {
    const char* codes = group + Dot::kCodesAt;
    if constexpr (Dot::kGrouped.codes != Codes::kBytes) {
      for (int e = 0; e < Dot::kGroup; e += 8) {
        for (int j = 0; j < kPanelVectors; ++j) {
          typename Dot::Bytes first, second;
          Dot::load_codes(group, e, j, &first, &second);
          char* const to = unpacked + e * Dot::kWidth + j * Dot::kLanes * 4;
          _mm512_store_si512(to, first);
          _mm512_store_si512(to + 4 * Dot::kWidth, second);
        }
      }
      codes = unpacked;
    }
    for (int line = 0; line < Dot::kGroupBytes; line += 64) {
      __builtin_prefetch(group + tuning::kGroupPrefetchBytes + line, 0, 2);
    }
    typename Dot::Floats scales[kPanelVectors], minimums[kPanelVectors];
    for (int j = 0; j < kPanelVectors; ++j) {
      scales[j] = Dot::load_scales(step, group, j);
      if constexpr (Dot::kHasMinimums) minimums[j] = Dot::load_minimums(step, group, j);
    }
    for (int64_t tile = 0; tile < tiles.count; ++tile) {
      const int64_t first_row = tiles.first_row(tile);
      const char* const x = static_cast<const char*>(input.rows) + first_row * input.row_bytes + at;
      zero_tile<0>();
      zero_tile<1>();
      zero_tile<2>();
      zero_tile<3>();
      for (int e = 0; e < Dot::kGroup; e += kGroupTileBytes<Dot>) {
        const char* const w = codes + e * Dot::kWidth;
        load_tile<4>(x + sizeof(GroupInput) + e, input.row_bytes);
        load_tile<6>(w, kPanelStepBytes);
        multiply_codes<0, 4, 6>();
        load_tile<7>(w + kMatrixTileBytes, kPanelStepBytes);
        multiply_codes<1, 4, 7>();
        load_tile<6>(w + 2 * kMatrixTileBytes, kPanelStepBytes);
        multiply_codes<2, 4, 6>();
        load_tile<7>(w + 3 * kMatrixTileBytes, kPanelStepBytes);
        multiply_codes<3, 4, 7>();
      }
      store_tile<0>(products, kPanelStepBytes);
      store_tile<1>(products + kMatrixTileColumns, kPanelStepBytes);
      store_tile<2>(products + 2 * kMatrixTileColumns, kPanelStepBytes);
      store_tile<3>(products + 3 * kMatrixTileColumns, kPanelStepBytes);
      for (int64_t row = tiles.repeated(tile); row < tiles.height; ++row) {
        GroupInput of_row;
        __builtin_memcpy(&of_row, x + row * input.row_bytes, sizeof(of_row));
        float* const to = sums + (first_row + row) * Dot::kWidth;
#pragma GCC unroll 4
        for (int j = 0; j < kPanelVectors; ++j) {
          const __m512i product = _mm512_load_si512(products + row * Dot::kWidth + j * Dot::kLanes);
          const auto values =
              Dot::to_floats(_mm512_add_epi32(product, Dot::offset_of(of_row, group, j)));
          const auto factors = Dot::times(scales[j], Dot::same(of_row.scale));
          auto total = Dot::load_floats(to + j * Dot::kLanes);
          total = Dot::add_product(values, factors, total);
          if constexpr (Dot::kHasMinimums) {
            total = Dot::add_product(minimums[j], Dot::same(of_row.scaled_sum), total);
          }
          Dot::store_floats(to + j * Dot::kLanes, total);
        }
      }
    }
  };
  for (int64_t s = 0; s < steps; ++s) {
    const char* const step = weights + s * Dot::kStepBytes;
    for (int g = 0; g < Dot::kStepGroups; ++g) {
      add_group(step, step + Dot::kSuperBytes + g * Dot::kGroupBytes,
                input_at + s * Dot::kInputBytes + g * Dot::kGroupInputBytes);
    }
  }
}

}  // namespace lmdecode::LMD_SIMD::linear

#endif
