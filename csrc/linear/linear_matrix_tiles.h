// Sums of a block of rows and a panel by tiles of the matrix units: the panels of other levels,
// whose steps along the depth are the rows of a tile of weights.
//
// A sum starts from 0; each 16 steps (32 bfloat16 numbers, 64 bytes) are one product of tiles, and
// are added in their order, whatever the rows beside it. What a depth lacks to 16 steps is zeros.
#pragma once

#include "linear/linear_formats.h"
#include "linear/linear_tuning.h"
#include "simd/matrix_tiles.h"

namespace lmdecode::LMD_SIMD::linear {

using namespace lmdecode::linear;

constexpr int64_t kTileSteps = 16;        // of a panel, in one tile of weights
constexpr int64_t kPanelStepBytes = 256;  // of 64 outputs
constexpr int64_t kTileStride = kTileSteps * kPanelStepBytes;

// Rows in tiles of the same height, so that one configuration serves them. The last tile ends with
// the rows, and may begin within the one before it: these rows are computed twice.
struct RowTiles {
  int64_t rows = 0, count = 0, height = 0;

  static RowTiles of(int64_t rows) {
    RowTiles tiles = {rows, (rows + kMatrixTileRows - 1) / kMatrixTileRows, 0};
    if (rows > 0) tiles.height = (rows + tiles.count - 1) / tiles.count;
    return tiles;
  }
  int64_t first_row(int64_t tile) const { return tile + 1 < count ? tile * height : rows - height; }
  // Rows of a tile that the one before it has.
  int64_t repeated(int64_t tile) const { return tile * height - first_row(tile); }
  // Where a row lies in tiles one after the other, of count * height rows: at most 16 count.
  int64_t place(int64_t row) const {
    const int64_t last = (count - 1) * height;
    return row < last ? row : row + repeated(count - 1);
  }
};

// a: registers 4 and 5, b: 6 and 7, c: 0 to 3.
inline TileConfig row_tile_config(const RowTiles& tiles) {
  TileConfig config;
  for (int tile = 0; tile < 6; ++tile) config.set(tile, tiles.height, kMatrixTileBytes);
  for (int tile = 6; tile < 8; ++tile) config.set(tile, kTileSteps, kMatrixTileBytes);
  return config;
}

// Tiles of weights along the depth, from one step of a panel on.
struct WeightTiles {
  const char* first;
  int64_t count;
  const char* rest;   // one more tile, its last steps zeros, or null
  const char* ahead;  // what is fetched meanwhile: lines [first_line, last_line) of tiles from here
  int first_line, last_line;
};

// For each of kRowTiles tiles of rows, whose inputs begin at `input`: sums [rows, 64] = the sums so
// far, if not the first part, + the products with kColumnTiles tiles of 16 outputs.
template <class Dot, int kRowTiles, int kColumnTiles>
inline void add_tiles(const char* const (&input)[kRowTiles], int64_t row_bytes,
                      const WeightTiles& weights, bool is_first,
                      typename Dot::Scalar* const (&sums)[kRowTiles]) {
  static_assert(kRowTiles * kColumnTiles <= 4);
  constexpr int64_t kSumStride = 4 * kMaxPanelWidth;
  const auto each = [&](const auto& visit) __attribute__((always_inline)) {
    visit.template operator()<0>(sums[0]);
    visit.template operator()<1>(sums[0] + kMatrixTileColumns);
    if constexpr (kColumnTiles == 4) {
      visit.template operator()<2>(sums[0] + 2 * kMatrixTileColumns);
      visit.template operator()<3>(sums[0] + 3 * kMatrixTileColumns);
    } else if constexpr (kRowTiles == 2) {
      visit.template operator()<2>(sums[1]);
      visit.template operator()<3>(sums[1] + kMatrixTileColumns);
    }
  };
  const auto multiply = []<int kC, int kA, int kB>() __attribute__((always_inline)) {
    if constexpr (kIsInt8<Dot>) {
      multiply_int8<kC, kA, kB>();
    } else {
      multiply_bfloat16<kC, kA, kB>();
    }
  };
  each([&]<int kTile>(const typename Dot::Scalar* from) {
    if (is_first) {
      zero_tile<kTile>();
    } else {
      load_tile<kTile>(from, kSumStride);
    }
  });
  const auto step = [&](const char* w, int64_t at) __attribute__((always_inline)) {
    load_tile<6>(w, kPanelStepBytes);
    load_tile<4>(input[0] + at, row_bytes);
    multiply.template operator()<0, 4, 6>();
    load_tile<7>(w + kMatrixTileBytes, kPanelStepBytes);
    multiply.template operator()<1, 4, 7>();
    if constexpr (kColumnTiles == 4) {
      load_tile<6>(w + 2 * kMatrixTileBytes, kPanelStepBytes);
      multiply.template operator()<2, 4, 6>();
      load_tile<7>(w + 3 * kMatrixTileBytes, kPanelStepBytes);
      multiply.template operator()<3, 4, 7>();
    } else if constexpr (kRowTiles == 2) {
      load_tile<5>(input[1] + at, row_bytes);
      multiply.template operator()<2, 5, 6>();
      multiply.template operator()<3, 5, 7>();
    }
  };
  for (int64_t k = 0; k < weights.count; ++k) {
    for (int i = weights.first_line; i < weights.last_line; ++i) {
      __builtin_prefetch(weights.ahead + k * kTileStride + i * kMatrixTileBytes, 0, 2);
    }
    step(weights.first + k * kTileStride, k * kMatrixTileBytes);
  }
  if (weights.rest != nullptr) step(weights.rest, weights.count * kMatrixTileBytes);
  each([&]<int kTile>(typename Dot::Scalar* to) { store_tile<kTile>(to, kSumStride); });
}

// The sums of a panel, [count * height, 64]: those of a row at tiles.place(row). Up to 16 rows read
// the weights once, in the order of the memory. With more a part of the panel that stays in the
// caches meets all rows before the next, half of its outputs at a time.
template <class Dot>
void add_panel_by_tiles(const LinearInput& input, const RowTiles& tiles, const char* panel,
                        int64_t depth, typename Dot::Scalar* sums) {
  constexpr int kLines = kTileStride / kMatrixTileBytes;
  const int64_t whole = depth / kTileSteps;
  alignas(64) char rest[kTileStride];
  const bool has_rest = depth % kTileSteps != 0;
  if (has_rest) {
    const int64_t bytes = depth % kTileSteps * kPanelStepBytes;
    __builtin_memcpy(rest, panel + whole * kTileStride, static_cast<size_t>(bytes));
    __builtin_memset(rest + bytes, 0, static_cast<size_t>(kTileStride - bytes));
  }
  const auto rows_of = [&](int64_t tile, int64_t k) {
    return static_cast<const char*>(input.rows) + tiles.first_row(tile) * input.row_bytes +
           k * kMatrixTileBytes;
  };
  const auto sums_of = [&](int64_t tile) { return sums + tile * tiles.height * kMaxPanelWidth; };
  if (tiles.count == 1) {
    const char* const ahead = panel + tuning::kMatrixPrefetchBytes;
    const WeightTiles weights = {panel, whole, has_rest ? rest : nullptr, ahead, 0, kLines};
    return add_tiles<Dot, 1, 4>({rows_of(0, 0)}, input.row_bytes, weights, true, {sums_of(0)});
  }
  const int64_t passes = (tiles.count + 1) / 2 * 2;
  int64_t at = 0;
  do {
    const int64_t left = whole - at;
    const int64_t count = left < tuning::kMatrixChainTiles ? left : tuning::kMatrixChainTiles;
    const bool is_last = at + count == whole;
    int64_t pass = 0;
    for (int half = 0; half < 2; ++half) {
      const int64_t column = 2 * half * kMatrixTileColumns;
      const char* const part = panel + at * kTileStride;
      WeightTiles weights = {
          part + 4 * column,          count, is_last && has_rest ? rest + 4 * column : nullptr,
          part + count * kTileStride, 0,     0};
      for (int64_t tile = 0; tile < tiles.count; tile += 2, ++pass) {
        weights.first_line = static_cast<int>(kLines * pass / passes);
        weights.last_line = static_cast<int>(kLines * (pass + 1) / passes);
        if (tile + 1 < tiles.count) {
          add_tiles<Dot, 2, 2>({rows_of(tile, at), rows_of(tile + 1, at)}, input.row_bytes, weights,
                               at == 0, {sums_of(tile) + column, sums_of(tile + 1) + column});
        } else {
          add_tiles<Dot, 1, 2>({rows_of(tile, at)}, input.row_bytes, weights, at == 0,
                               {sums_of(tile) + column});
        }
      }
    }
    at += count;
  } while (at < whole);
}

}  // namespace lmdecode::LMD_SIMD::linear
