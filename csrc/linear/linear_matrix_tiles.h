// Sums of a block of rows and a panel by tiles of the matrix units: the same panels as at other
// levels; a step along the depth is a row of a tile of weights.
//
// A sum starts from 0; each 16 steps (32 bfloat16 numbers, 64 bytes) are one product of tiles, and
// are added in their order, independent of the rows beside it. The depth is padded with zeros to 16
// steps.
#pragma once

#include "linear/linear_formats.h"
#include "linear/linear_group_products.h"
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
  // The place of a row in consecutive tiles of count * height rows.
  int64_t place(int64_t row) const {
    const int64_t last = (count - 1) * height;
    return row < last ? row : row + repeated(count - 1);
  }
};

// a: registers 4 and 5, b: 6, c: 0 to 3. A core may be in a state in which a tile load takes the
// longer, the more registers are in use, from their first load or product until they are zeroed.
inline TileConfig row_tile_config(const RowTiles& tiles) {
  TileConfig config;
  for (int tile = 0; tile < 6; ++tile) config.set(tile, tiles.height, kMatrixTileBytes);
  config.set(6, kTileSteps, kMatrixTileBytes);
  return config;
}

// Tiles of weights along the depth, from one step of a panel on.
struct WeightTiles {
  const char* first;
  int64_t count;
  const char* rest;   // one more tile, its last steps zeros, or null
  const char* ahead;  // prefetched meanwhile: lines [first_line, last_line) of tiles from here
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
      load_passing_tile<kTile>(from, kSumStride);
    }
  });
  if constexpr (kRowTiles == 1 && kColumnTiles == 2) {  // what the pairs before it left
    zero_tile<2>();
    zero_tile<3>();
    zero_tile<5>();
  }
  const auto step = [&](const char* w, int64_t at) __attribute__((always_inline)) {
    load_tile<6>(w, kPanelStepBytes);
    if constexpr (kColumnTiles == 4) {  // all panels read the rows; weights pass
      load_tile<4>(input[0] + at, row_bytes);
    } else {
      load_passing_tile<4>(input[0] + at, row_bytes);
    }
    multiply.template operator()<0, 4, 6>();
    if constexpr (kRowTiles == 2) {
      load_passing_tile<5>(input[1] + at, row_bytes);
      multiply.template operator()<2, 5, 6>();
    }
    load_tile<6>(w + kMatrixTileBytes, kPanelStepBytes);
    if constexpr (kRowTiles == 2) multiply.template operator()<3, 5, 6>();
    multiply.template operator()<1, 4, 6>();
    if constexpr (kColumnTiles == 4) {
      load_tile<6>(w + 2 * kMatrixTileBytes, kPanelStepBytes);
      multiply.template operator()<2, 4, 6>();
      load_tile<6>(w + 3 * kMatrixTileBytes, kPanelStepBytes);
      multiply.template operator()<3, 4, 6>();
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
  const int64_t most = tuning::kMatrixChainTiles, steps = whole + has_rest;
  const int64_t chains = steps > most ? (steps + most - 1) / most : 1;
  for (int64_t chain = 0; chain < chains; ++chain) {
    const int64_t at = whole * chain / chains, count = whole * (chain + 1) / chains - at;
    const bool is_last = chain + 1 == chains;
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
  }
}

}  // namespace lmdecode::LMD_SIMD::linear

// Sums of a block of rows and a panel with groups, by tiles of the matrix units: the codes of a
// group become the bytes of tiles once for some tiles of rows, their products are exact, and scales
// are applied in the order of add_groups() in linear_tiles.h: the same bits.

#if defined(LMD_SIMD_AVX512_AMX)

namespace lmdecode::LMD_SIMD::linear {

using namespace lmdecode::linear;

// Elements of a group in one product of tiles.
template <class Dot>
constexpr int kGroupTileBytes = Dot::kGroup < 64 ? Dot::kGroup : 64;

// Whether codes are unpacked: to numbers with sign, from which no offset is left to subtract.
template <class Dot>
constexpr bool kIsUnpacked = Dot::kGrouped.codes != Codes::kBytes;

// a: register 4, b: 6 and 7, c: 0 to 3.
template <class Dot>
inline TileConfig group_tile_config(const RowTiles& tiles) {
  TileConfig config;
  for (int tile = 0; tile < 4; ++tile) config.set(tile, tiles.height, kMatrixTileBytes);
  config.set(4, tiles.height, kGroupTileBytes<Dot>);
  for (int tile = 6; tile < 8; ++tile) config.set(tile, kGroupTileBytes<Dot> / 4, kMatrixTileBytes);
  return config;
}

// Subtracted from each byte of a quad: the zero of its output, at most 16, or the middle.
template <class Dot>
inline __m512i code_zeros(const char* group, int j) {
  if constexpr (Dot::kHasZeros) {
    const char* const zeros = group + Dot::kOffsetsAt + j * Dot::kLanes;
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros));
    return _mm512_mullo_epi32(_mm512_cvtepu8_epi32(bytes), _mm512_set1_epi32(0x01010101));
  } else {
    return _mm512_set1_epi8(static_cast<char>(Dot::kGrouped.middle()));
  }
}

// numbers [group / 4, 64, 4] = the codes of a group, their zeros subtracted.
template <class Dot>
inline void unpack_codes(const char* group, char* numbers) {
  static_assert(Dot::kGrouped.codes == Codes::kNibbles || !(Dot::kHasZeros || Dot::kHasMinimums),
                "a number of a table is a signed byte only above its middle");
  for (int j = 0; j < kPanelVectors; ++j) {
    const __m512i zeros = code_zeros<Dot>(group, j);
    for (int e = 0; e < Dot::kGroup; e += 8) {
      typename Dot::Bytes first, second;
      Dot::load_codes(group, e, j, &first, &second);
      if constexpr (!Dot::kHasMinimums) {
        first = _mm512_sub_epi8(first, zeros);
        second = _mm512_sub_epi8(second, zeros);
      }
      char* const to = numbers + e * Dot::kWidth + j * Dot::kLanes * 4;
      _mm512_store_si512(to, first);
      _mm512_store_si512(to + 4 * Dot::kWidth, second);
    }
  }
}

// products [height, 64] = the sums of a group for a tile of rows, whose elements begin at x.
template <class Dot>
inline void multiply_group(const char* x, int64_t row_bytes, const char* numbers,
                           int32_t* products) {
  const auto multiply = []<int kC, int kB>() __attribute__((always_inline)) {
    if constexpr (kIsUnpacked<Dot>) {
      multiply_numbers<kC, 4, kB>();
    } else {
      multiply_codes<kC, 4, kB>();
    }
  };
  zero_tile<0>();
  zero_tile<1>();
  zero_tile<2>();
  zero_tile<3>();
  for (int e = 0; e < Dot::kGroup; e += kGroupTileBytes<Dot>) {
    const char* const w = numbers + e * Dot::kWidth;
    load_tile<4>(x + e, row_bytes);
    load_tile<6>(w, kPanelStepBytes);
    multiply.template operator()<0, 6>();
    load_tile<7>(w + kMatrixTileBytes, kPanelStepBytes);
    multiply.template operator()<1, 7>();
    load_tile<6>(w + 2 * kMatrixTileBytes, kPanelStepBytes);
    multiply.template operator()<2, 6>();
    load_tile<7>(w + 3 * kMatrixTileBytes, kPanelStepBytes);
    multiply.template operator()<3, 7>();
  }
  store_tile<0>(products, kPanelStepBytes);
  store_tile<1>(products + kMatrixTileColumns, kPanelStepBytes);
  store_tile<2>(products + 2 * kMatrixTileColumns, kPanelStepBytes);
  store_tile<3>(products + 3 * kMatrixTileColumns, kPanelStepBytes);
}

// A group of a panel, and where its elements of x begin in a row.
struct PanelGroup {
  const char *step, *group;
  int64_t input_at;
};

// sums [rows, 64] += products * scales, for the rows [first, height) of a tile, whose inputs of the
// group begin at x.
template <class Dot>
inline void add_scaled(const PanelGroup& at, const char* x, int64_t row_bytes, int64_t first,
                       int64_t height, const int32_t* products, float* sums) {
  typename Dot::Floats scales[kPanelVectors], minimums[kPanelVectors];
#pragma GCC unroll 4
  for (int j = 0; j < kPanelVectors; ++j) {
    scales[j] = Dot::load_scales(at.step, at.group, j);
    if constexpr (Dot::kHasMinimums) minimums[j] = Dot::load_minimums(at.step, at.group, j);
  }
  for (int64_t row = first; row < height; ++row) {
    GroupInput of_row;
    __builtin_memcpy(&of_row, x + row * row_bytes, sizeof(of_row));
    float* const to = sums + row * Dot::kWidth;
#pragma GCC unroll 4
    for (int j = 0; j < kPanelVectors; ++j) {
      __m512i product = _mm512_load_si512(products + row * Dot::kWidth + j * Dot::kLanes);
      if constexpr (!kIsUnpacked<Dot> && !Dot::kHasMinimums) {
        product = _mm512_add_epi32(product, Dot::offset_of(of_row, at.group, j));
      }
      const auto factors = Dot::times(scales[j], Dot::same(of_row.scale));
      auto total = Dot::load_floats(to + j * Dot::kLanes);
      total = Dot::add_product(Dot::to_floats(product), factors, total);
      if constexpr (Dot::kHasMinimums) {
        total = Dot::add_product(minimums[j], Dot::same(of_row.scaled_sum), total);
      }
      Dot::store_floats(to + j * Dot::kLanes, total);
    }
  }
}

// sums [rows, 64] += `steps` steps, the weights of which begin at `weights`, and the inputs of the
// rows at `input_at`; from 0, if first. Some tiles of rows, whose sums stay in L1, pass over all
// groups before the next. While the tiles multiply, vectors scale the products of the previous
// group, so that neither waits for the other.
template <class Dot>
void add_groups_by_tiles(const LinearInput& input, const RowTiles& tiles, int64_t input_at,
                         const char* weights, int64_t steps, bool is_first, float* sums) {
  static_assert(Dot::kWidth == kMaxPanelWidth && kPanelVectors == 4);
  if (is_first) {
    __builtin_memset(sums, 0, static_cast<size_t>(input.count * Dot::kWidth) * sizeof(float));
  }
  if (steps == 0) return;
  alignas(64) char unpacked[2][kIsUnpacked<Dot> ? Dot::kGroup * Dot::kWidth : 1];
  alignas(64) int32_t products[2][kMatrixTileRows * Dot::kWidth];
  const int64_t groups = steps * Dot::kStepGroups;
  const auto group_at = [&](int64_t i) {
    const int64_t s = i / Dot::kStepGroups, g = i % Dot::kStepGroups;
    const char* const step = weights + s * Dot::kStepBytes;
    return PanelGroup{step, step + Dot::kSuperBytes + g * Dot::kGroupBytes,
                      input_at + s * Dot::kInputBytes + g * Dot::kGroupInputBytes};
  };
  const auto numbers_of = [&](int64_t i) -> const char* {
    return kIsUnpacked<Dot> ? unpacked[i % 2] : group_at(i).group + Dot::kCodesAt;
  };
  const auto unpack = [&](int64_t i) {
    const char* const group = group_at(i).group;
    for (int line = 0; line < Dot::kGroupBytes; line += 64) {
      __builtin_prefetch(group + tuning::kGroupPrefetchBytes + line, 0, 2);
    }
    if constexpr (kIsUnpacked<Dot>) unpack_codes<Dot>(group, unpacked[i % 2]);
  };
  const auto input_of = [&](const PanelGroup& group, int64_t tile) {
    return static_cast<const char*>(input.rows) + tiles.first_row(tile) * input.row_bytes +
           group.input_at;
  };
  const int64_t parts = (tiles.count + tuning::kMatrixGroupTiles - 1) / tuning::kMatrixGroupTiles;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t begin = tiles.count * part / parts, end = tiles.count * (part + 1) / parts;
    // The products of a tile and a group that are not yet scaled.
    PanelGroup waiting = {};
    int64_t waiting_tile = -1;
    int buffer = 0;
    const auto scale_waiting = [&] {
      add_scaled<Dot>(waiting, input_of(waiting, waiting_tile), input.row_bytes,
                      tiles.repeated(waiting_tile), tiles.height, products[1 - buffer],
                      sums + tiles.first_row(waiting_tile) * Dot::kWidth);
    };
    unpack(0);
    for (int64_t i = 0; i < groups; ++i) {
      const PanelGroup group = group_at(i);
      if (i + 1 < groups) unpack(i + 1);
      for (int64_t tile = begin; tile < end; ++tile) {
        multiply_group<Dot>(input_of(group, tile) + sizeof(GroupInput), input.row_bytes,
                            numbers_of(i), products[buffer]);
        if (waiting_tile >= 0) scale_waiting();
        waiting = group;
        waiting_tile = tile;
        buffer = 1 - buffer;
      }
    }
    scale_waiting();
  }
}

}  // namespace lmdecode::LMD_SIMD::linear

#endif
