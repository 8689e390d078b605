// Products of a block of rows by tiles of the matrix units: in panels of 32 outputs a step along
// the depth is a row of two tiles of weights, 128 bytes.
//
// A sum starts from 0; each 16 steps (32 bfloat16 numbers, 64 bytes) are one product of tiles, and
// are added in their order, independent of the rows beside it. The depth is padded with zeros to 16
// steps.
#pragma once

#include "linear/linear_epilogue.h"
#include "linear/linear_group_products.h"
#include "linear/linear_tuning.h"
#include "linear/packed_linear_kernels.h"
#include "simd/matrix_tiles.h"

namespace lmdecode::LMD_SIMD::linear {

using namespace lmdecode::linear;

constexpr int64_t kTileSteps = 16;  // of a panel, in one tile of weights
constexpr int64_t kTilePanelWidth = 2 * kMatrixTileColumns;
constexpr int64_t kStepBytes = 4 * kTilePanelWidth;
constexpr int64_t kTileStride = kTileSteps * kStepBytes;  // of two tiles of weights

// Rows in tiles of the same height, so that one configuration serves them. Where rows lie one after
// another the last tile ends with the rows, and may begin within the one before it: these rows are
// computed twice. Where they lie in tiles (LinearInput) it may have more rows than there are.
struct RowTiles {
  int64_t rows, count, height;
  int64_t row_stride, step;  // bytes from row to row of a tile, and along the depth

  static RowTiles of(const LinearInput& input) {
    if (input.tile_rows > 0) {
      const int64_t height = input.tile_rows;
      return {input.count, (input.count + height - 1) / height, height, kMatrixTileBytes,
              height * kMatrixTileBytes};
    }
    const int64_t count = (input.count + kMatrixTileRows - 1) / kMatrixTileRows;
    return {input.count, count, (input.count + count - 1) / count, input.row_bytes,
            kMatrixTileBytes};
  }
  bool is_laid() const { return step > kMatrixTileBytes; }
  int64_t first_row(int64_t tile) const {
    return tile + 1 < count || is_laid() ? tile * height : rows - height;
  }
  // Rows of a tile that the one before it has.
  int64_t repeated(int64_t tile) const { return tile * height - first_row(tile); }
};

// Blocks of rows whose inputs stay in the second cache while panels pass; more than 16 rows lie in
// tiles.
inline LinearRowCut cut_to_tiles(int64_t row_bytes, int64_t rows) {
  using namespace tuning;
  constexpr int64_t kPair = 2 * kMatrixTileRows;
  int64_t block = kMatrixMostRows;
  if (row_bytes * block > kMatrixBlockBytes) block = kMatrixBlockBytes / row_bytes / kPair * kPair;
  if (block < kMatrixLeastRows) block = kMatrixLeastRows;
  if (rows <= kMatrixTileRows) return {block, 0};
  return {block, RowTiles::of({nullptr, nullptr, row_bytes, rows}).height};
}

// a: registers 4 and 5, b: 6, c: 0 to 3. A core may be in a state in which a tile load takes the
// longer, the more registers are in use, from their first load or product until they are zeroed.
inline TileConfig row_tile_config(const RowTiles& tiles) {
  TileConfig config;
  for (int tile = 0; tile < 6; ++tile) config.set(tile, tiles.height, kMatrixTileBytes);
  config.set(6, kTileSteps, kMatrixTileBytes);
  return config;
}

// Tiles of a panel along the depth, from a step on.
struct WeightTiles {
  const char* first = nullptr;
  const char* rest = nullptr;  // behind the others, its last steps zeros, or null
};

// sums [rows, 32] = the sums so far, if not the first part, + products: of one or two tiles of rows
// and a panel, or of a tile of rows and two panels. The tiles along the depth are `count` and the
// rest. Meanwhile lines [first_line, last_line) from ahead(panel, tile) on are fetched.
template <class Dot, int kRowTiles, int kPanels, class Ahead>
inline void add_tiles(const char* const (&input)[2], const RowTiles& rows,
                      const WeightTiles (&weights)[2], int64_t count, const Ahead& ahead,
                      int first_line, int last_line, bool is_first,
                      typename Dot::Scalar* const (&sums)[2]) {
  static_assert(kRowTiles * kPanels <= 2);
  constexpr int64_t kSumStride = 4 * kTilePanelWidth;
  const auto each = [&](const auto& visit) __attribute__((always_inline)) {
    visit.template operator()<0>(sums[0]);
    visit.template operator()<1>(sums[0] + kMatrixTileColumns);
    if constexpr (kRowTiles * kPanels == 2) {
      visit.template operator()<2>(sums[1]);
      visit.template operator()<3>(sums[1] + kMatrixTileColumns);
    }
  };
  const auto multiply = []<int kC, int kA>() __attribute__((always_inline)) {
    if constexpr (kIsInt8<Dot>) {
      multiply_int8<kC, kA, 6>();
    } else {
      multiply_bfloat16<kC, kA, 6>();
    }
  };
  each([&]<int kTile>(const typename Dot::Scalar* from) {
    if (is_first) {
      zero_tile<kTile>();
    } else {
      load_passing_tile<kTile>(from, kSumStride);
    }
  });
  if constexpr (kRowTiles * kPanels == 1) {  // what the pairs before it left
    zero_tile<2>();
    zero_tile<3>();
    zero_tile<5>();
  }
  const int64_t stride = rows.row_stride, along = rows.step;
  const auto step = [&](const char* w, const char* v, int64_t at) __attribute__((always_inline)) {
    load_tile<6>(w, kStepBytes);
    if constexpr (kRowTiles == 2) {
      load_passing_tile<4>(input[0] + at, stride);
    } else {  // all panels read the rows; weights pass
      load_tile<4>(input[0] + at, stride);
    }
    multiply.template operator()<0, 4>();
    if constexpr (kRowTiles == 2) {
      load_passing_tile<5>(input[1] + at, stride);
      multiply.template operator()<2, 5>();
    }
    load_tile<6>(w + kMatrixTileBytes, kStepBytes);
    if constexpr (kRowTiles == 2) multiply.template operator()<3, 5>();
    multiply.template operator()<1, 4>();
    if constexpr (kPanels == 2) {
      load_tile<6>(v, kStepBytes);
      multiply.template operator()<2, 4>();
      load_tile<6>(v + kMatrixTileBytes, kStepBytes);
      multiply.template operator()<3, 4>();
    }
  };
  int64_t at = 0;
  for (int64_t k = 0; k < count; ++k, at += along) {
#pragma GCC unroll 2
    for (int panel = 0; panel < kPanels; ++panel) {
      const char* const from = ahead(panel, k);
      for (int i = first_line; i < last_line; ++i) {
        __builtin_prefetch(from + i * kMatrixTileBytes, 0, 2);
      }
    }
    step(weights[0].first + k * kTileStride, weights[1].first + k * kTileStride, at);
  }
  if (weights[0].rest != nullptr) step(weights[0].rest, weights[1].rest, at);
  each([&]<int kTile>(typename Dot::Scalar* to) { store_tile<kTile>(to, kSumStride); });
}

// How a panel is cut along the depth.
struct TileDepth {
  int64_t whole, rest;  // tiles, and steps behind them

  explicit TileDepth(int64_t depth) : whole(depth / kTileSteps), rest(depth % kTileSteps) {}
  int64_t count() const { return whole + (rest > 0); }
  // The last tile of a panel in `memory`, its last steps zeros; null where all tiles are whole.
  const char* rest_of(const char* panel, char* memory) const {
    if (rest == 0) return nullptr;
    const int64_t bytes = rest * kStepBytes;
    __builtin_memcpy(memory, panel + whole * kTileStride, static_cast<size_t>(bytes));
    __builtin_memset(memory + bytes, 0, static_cast<size_t>(kTileStride - bytes));
    return memory;
  }
};

constexpr int kTileLines = static_cast<int>(kTileStride / kMatrixTileBytes);

// Up to 16 rows meet two panels at a time, whose weights are read once, each in the order of the
// memory.
template <class Dot>
void multiply_few_rows(const Panels<Dot>& panels, const LinearInput& input, const RowTiles& tiles,
                       int64_t begin, int64_t end) {
  constexpr int64_t kAhead = tuning::kMatrixPrefetchBytes / (2 * kTileStride);
  alignas(64) typename Dot::Scalar sums[2][kMatrixTileRows * kTilePanelWidth];
  alignas(64) char rests[2][kTileStride];
  const TileDepth depth(panels.layout.depth);
  const char* const rows = static_cast<const char*>(input.rows);
  const auto add = [&]<int kPanels>(int64_t panel) {
    WeightTiles weights[2] = {};
    for (int i = 0; i < kPanels; ++i) {
      const char* const first = panels.at(panel + i);
      weights[i] = {first, depth.rest_of(first, rests[i])};
    }
    const auto ahead = [&](int i, int64_t k) {
      const int64_t tile = k + kAhead, behind = tile - depth.count();
      const char* const from = behind < 0 ? weights[i].first : panels.at(panel + i + kPanels);
      return from + (behind < 0 ? tile : behind) * kTileStride;
    };
    add_tiles<Dot, 1, kPanels>({rows, rows}, tiles, weights, depth.whole, ahead, 0, kTileLines,
                               true, {sums[0], sums[1]});
    for (int i = 0; i < kPanels; ++i) panels.finish(sums[i], panel + i, 0, input.count);
  };
  int64_t panel = begin;
  for (; panel + 1 < end; panel += 2) add.template operator()<2>(panel);
  if (panel < end) add.template operator()<1>(panel);
}

// More rows: a part of a panel that stays in the caches meets all of them, two tiles at a time,
// before the next, which is fetched meanwhile. Rows whose sums are complete are finished at once.
template <class Dot>
void multiply_many_rows(const Panels<Dot>& panels, const LinearInput& input, const RowTiles& tiles,
                        int64_t begin, int64_t end) {
  alignas(64) typename Dot::Scalar sums[tuning::kMatrixMostRows * kTilePanelWidth];
  alignas(64) char memory[kTileStride];
  const TileDepth depth(panels.layout.depth);
  const int64_t most = tuning::kMatrixChainTiles, pairs = (tiles.count + 1) / 2;
  const int64_t parts = depth.count() > most ? (depth.count() + most - 1) / most : 1;
  for (int64_t panel = begin; panel < end; ++panel) {
    const char* const weights = panels.at(panel);
    const char* const rest = depth.rest_of(weights, memory);
    for (int64_t part = 0; part < parts; ++part) {
      const bool is_last = part + 1 == parts;
      const int64_t first = depth.count() * part / parts;
      const int64_t last = is_last ? depth.whole : depth.count() * (part + 1) / parts;
      const char* const next = is_last ? panels.at(panel + 1) : weights + last * kTileStride;
      const auto ahead = [&](int, int64_t k) { return next + k * kTileStride; };
      const auto add = [&]<int kRowTiles>(int64_t pair) {
        const int64_t tile = 2 * pair;
        // Of a depth of one part the sums of a pair are short-lived, and stay in the first cache.
        auto* const to = sums + (parts > 1 ? tile * tiles.height * kTilePanelWidth : 0);
        typename Dot::Scalar* const sums_of[2] = {to, to + tiles.height * kTilePanelWidth};
        const char* input_of[2] = {};
        for (int i = 0; i < kRowTiles; ++i) {
          input_of[i] = static_cast<const char*>(input.rows) +
                        tiles.first_row(tile + i) * input.row_bytes + first * tiles.step;
        }
        add_tiles<Dot, kRowTiles, 1>(
            input_of, tiles, {{weights + first * kTileStride, is_last ? rest : nullptr}, {}},
            last - first, ahead, static_cast<int>(kTileLines * pair / pairs),
            static_cast<int>(kTileLines * (pair + 1) / pairs), part == 0, sums_of);
        for (int i = 0; is_last && i < kRowTiles; ++i) {
          const int64_t row = (tile + i) * tiles.height, left = tiles.rows - row;
          panels.finish(sums_of[i] + tiles.repeated(tile + i) * kTilePanelWidth, panel, row,
                        left < tiles.height ? left : tiles.height);
        }
      };
      for (int64_t pair = 0; pair < tiles.count / 2; ++pair) add.template operator()<2>(pair);
      if (tiles.count % 2 != 0) add.template operator()<1>(pairs - 1);
    }
  }
}

}  // namespace lmdecode::LMD_SIMD::linear

// Sums of a block of rows and a panel with groups, by tiles of the matrix units: the codes of some
// groups become the bytes of tiles once for all tiles of rows, their products are exact, and scales
// are applied in the order of add_groups() in linear_tiles.h: the same bits.

#if defined(LMD_SIMD_AVX512_AMX)

namespace lmdecode::LMD_SIMD::linear {

using namespace lmdecode::linear;

constexpr int64_t kGroupStepBytes = 256;  // of 64 outputs
constexpr int64_t kProductsOfGroup = kMatrixTileRows * kMaxPanelWidth;
// Rows that are scaled together: their sums are half of the registers.
constexpr int kScaledRows = 4, kScaledParts = kMatrixTileRows / kScaledRows;

// Elements of a group in one product of tiles.
template <class Dot>
constexpr int kGroupTileBytes = Dot::kGroup < 64 ? Dot::kGroup : 64;

// Whether codes are unpacked: to numbers with sign, from which no offset is left to subtract. Bytes
// with minimums are multiplied as they are.
template <class Dot>
constexpr bool kIsUnpacked = Dot::kGrouped.codes != Codes::kBytes || !Dot::kHasMinimums;

// Groups whose products of a tile of rows are scaled together.
template <class Dot>
constexpr int kScaledGroups =
    tuning::kMatrixGroupBytes / (2 * 4 * kProductsOfGroup + Dot::kGroup * Dot::kWidth);

// a: register 4, b: 5, c: 0 to 3.
template <class Dot>
inline TileConfig group_tile_config(const RowTiles& tiles) {
  TileConfig config;
  for (int tile = 0; tile < 4; ++tile) config.set(tile, tiles.height, kMatrixTileBytes);
  config.set(4, tiles.height, kGroupTileBytes<Dot>);
  config.set(5, kGroupTileBytes<Dot> / 4, kMatrixTileBytes);
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
#pragma GCC unroll 4
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
  zero_tile<0>();
  zero_tile<1>();
  zero_tile<2>();
  zero_tile<3>();
  for (int e = 0; e < Dot::kGroup; e += kGroupTileBytes<Dot>) {
    const auto multiply = [&]<int kC>() __attribute__((always_inline)) {
      load_tile<5>(numbers + e * Dot::kWidth + kC * kMatrixTileBytes, kGroupStepBytes);
      if constexpr (kIsUnpacked<Dot>) {
        multiply_numbers<kC, 4, 5>();
      } else {
        multiply_codes<kC, 4, 5>();
      }
    };
    load_passing_tile<4>(x + e, row_bytes);
    multiply.template operator()<0>();
    multiply.template operator()<1>();
    multiply.template operator()<2>();
    multiply.template operator()<3>();
  }
  store_tile<0>(products, kGroupStepBytes);
  store_tile<1>(products + kMatrixTileColumns, kGroupStepBytes);
  store_tile<2>(products + 2 * kMatrixTileColumns, kGroupStepBytes);
  store_tile<3>(products + 3 * kMatrixTileColumns, kGroupStepBytes);
}

// Rows of a tile whose products with some groups are not yet scaled.
struct GroupSums {
  int64_t rows, groups;
  const int32_t* products;         // [rows, 64] of each group, which are 16 rows apart
  const float *scales, *minimums;  // [groups, 64]
  const char* input;               // of the first row and group
  int64_t row_bytes, group_bytes;  // of the input, from row to row and from group to group
  float* sums;                     // [rows, 64]
};

// sums += products * scales + minimums, group by group, for the rows [row, row + kRows), whose sums
// stay in registers.
template <bool kHasMinimums, int kRows>
inline void add_scaled_rows(const GroupSums& from, int64_t row) {
  using V = GroupVectors;
  float* const sums = from.sums + row * kMaxPanelWidth;
  V::Floats total[kRows * kPanelVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows * kPanelVectors; ++i) total[i] = V::load_floats(sums + i * V::kLanes);
  for (int64_t group = 0; group < from.groups; ++group) {
    const int32_t* const products = from.products + group * kProductsOfGroup + row * kMaxPanelWidth;
    const char* const input = from.input + group * from.group_bytes + row * from.row_bytes;
    const float* const scales = from.scales + group * kMaxPanelWidth;
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      GroupInput x;
      __builtin_memcpy(&x, input + r * from.row_bytes, sizeof(x));
#pragma GCC unroll 4
      for (int j = 0; j < kPanelVectors; ++j) {
        const int i = r * kPanelVectors + j;
        const auto factors = V::times(V::load_floats(scales + j * V::kLanes), V::same(x.scale));
        const auto values = V::to_floats(_mm512_load_si512(products + i * V::kLanes));
        total[i] = V::add_product(values, factors, total[i]);
        if constexpr (kHasMinimums) {
          const auto minimum =
              V::load_floats(from.minimums + group * kMaxPanelWidth + j * V::kLanes);
          total[i] = V::add_product(minimum, V::same(x.scaled_sum), total[i]);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows * kPanelVectors; ++i) V::store_floats(sums + i * V::kLanes, total[i]);
}

// The same for up to four rows from `row` on. One function for all formats.
template <bool kHasMinimums>
[[gnu::noinline]] void add_scaled(const GroupSums& from, int64_t row) {
  const int64_t left = from.rows - row;
  if (left >= kScaledRows) return add_scaled_rows<kHasMinimums, kScaledRows>(from, row);
  if (left == 3) return add_scaled_rows<kHasMinimums, 3>(from, row);
  if (left == 2) return add_scaled_rows<kHasMinimums, 2>(from, row);
  if (left == 1) return add_scaled_rows<kHasMinimums, 1>(from, row);
}

// sums [rows, 64] += `steps` steps, the weights of which begin at `weights`, and the inputs of the
// rows at `input_at`; from 0, if first. All tiles of rows meet some groups before the next ones.
// The products of a tile and these groups wait in a buffer, so that sums are read and written once
// for all of them. While the tiles multiply a group, vectors scale four rows of the previous
// buffer; the last rows are scaled alone.
template <class Dot>
void add_groups_by_tiles(const LinearInput& input, const RowTiles& tiles, int64_t input_at,
                         const char* weights, int64_t steps, bool is_first, float* sums) {
  static_assert(Dot::kWidth == kMaxPanelWidth && kPanelVectors == 4);
  constexpr int kMost = kScaledGroups<Dot>;
  static_assert(0 < kMost && kMost <= kScaledParts);
  if (is_first) {
    __builtin_memset(sums, 0, static_cast<size_t>(input.count * Dot::kWidth) * sizeof(float));
  }
  alignas(64) char unpacked[kMost][kIsUnpacked<Dot> ? Dot::kGroup * Dot::kWidth : 1];
  alignas(64) float scales[2][kMost][Dot::kWidth];
  alignas(64) float minimums[2][Dot::kHasMinimums ? kMost : 1][Dot::kWidth];
  alignas(64) int32_t products[2][kMost][kProductsOfGroup];
  const char* numbers[kMost];
  const auto unpack = [&](int64_t i, int to, int batch) {
    const char* const step = weights + i / Dot::kStepGroups * Dot::kStepBytes;
    const char* const group = step + Dot::kSuperBytes + i % Dot::kStepGroups * Dot::kGroupBytes;
#pragma GCC unroll 8
    for (int line = 0; line < Dot::kGroupBytes; line += 64) {
      __builtin_prefetch(group + tuning::kGroupPrefetchBytes + line, 0, 2);
    }
    numbers[to] = kIsUnpacked<Dot> ? unpacked[to] : group + Dot::kCodesAt;
    if constexpr (kIsUnpacked<Dot>) unpack_codes<Dot>(group, unpacked[to]);
    for (int j = 0; j < kPanelVectors; ++j) {
      const int at = j * Dot::kLanes;
      Dot::store_floats(scales[batch][to] + at, Dot::load_scales(step, group, j));
      if constexpr (Dot::kHasMinimums) {
        Dot::store_floats(minimums[batch][to] + at, Dot::load_minimums(step, group, j));
      }
    }
  };
  const int64_t groups = steps * Dot::kStepGroups;
  const char* const rows = static_cast<const char*>(input.rows) + input_at;
  GroupSums waiting = {}, next = {};
  next.row_bytes = input.row_bytes;
  next.group_bytes = Dot::kGroupInputBytes;
  int batch = 0, buffer = 0;
  for (int64_t first = 0; first < groups; first += kMost, batch = 1 - batch) {
    next.groups = groups - first < kMost ? groups - first : kMost;
    next.scales = scales[batch][0];
    next.minimums = minimums[batch][0];
    for (int i = 0; i < next.groups; ++i) unpack(first + i, i, batch);
    for (int64_t tile = 0; tile < tiles.count; ++tile, buffer = 1 - buffer) {
      const char* const x =
          rows + tiles.first_row(tile) * input.row_bytes + first * Dot::kGroupInputBytes;
      for (int part = 0; part < kScaledParts; ++part) {
        if (part < next.groups) {
          multiply_group<Dot>(x + part * Dot::kGroupInputBytes + sizeof(GroupInput),
                              input.row_bytes, numbers[part], products[buffer][part]);
        }
        add_scaled<Dot::kHasMinimums>(waiting, part * kScaledRows);
      }
      const int64_t repeated = tiles.repeated(tile);
      next.rows = tiles.height - repeated;
      next.products = products[buffer][0] + repeated * Dot::kWidth;
      next.input = x + repeated * input.row_bytes;
      next.sums = sums + tile * tiles.height * Dot::kWidth;
      waiting = next;
    }
  }
  for (int part = 0; part < kScaledParts; ++part) {
    add_scaled<Dot::kHasMinimums>(waiting, part * kScaledRows);
  }
}

}  // namespace lmdecode::LMD_SIMD::linear

#endif
