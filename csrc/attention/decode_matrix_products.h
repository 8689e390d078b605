// The products of decode_products.h by tiles of the matrix units, for caches of bfloat16 whose key
// heads have several query heads. A row has the bits of simd/matrix_tiles.h, whatever rows are
// beside it: a score is one chain of tiles along the head, and a block of 32 keys is one product
// with the values, added to what the row has.
#pragma once

#include "attention/decode_products.h"
#include "simd/matrix_tiles.h"

namespace lmdecode::LMD_SIMD::attention {

#if defined(LMD_SIMD_AVX512_AMX)

// Queries of 16 rows are a tile of pairs along the head; keys are the rows of the other factor, as
// they lie in the cache. Values are paired along the keys.
struct MatrixRows : PairRows {
  static constexpr bool kMultipliesTiles = true;
};

// Registers 0 to 2: scores, keys, queries. 3 to 5: outputs, weights, values. They are zero, and so
// free, but while they are in use.
inline TileConfig decode_matrix_config(int64_t rows) {
  TileConfig config;
  const int64_t of_strip = min_of(rows, kMatrixTileRows);
  for (int tile = 0; tile < 6; ++tile) {
    const bool has_rows = tile == 3 || tile == 4;
    config.set(tile, has_rows ? of_strip : kMatrixTileRows, kMatrixTileBytes);
  }
  return config;
}

// scores[row][0 .. 16) for a strip's rows: keys [16, size], key_stride apart; queries
// [size / 2, 16] pairs. size: a multiple of 32.
inline void score_key_tile(const BFloat16* keys, int64_t key_stride, const BFloat16* queries,
                           int64_t size, int64_t rows, float* scores) {
  alignas(64) float by_key[kMatrixTileRows * kMatrixTileColumns];
  for (int64_t at = 0; at < size; at += MatrixRows::kVectorSize) {
    load_tile<1>(keys + at, 2 * key_stride);
    load_tile<2>(queries + at * kMatrixTileColumns, kMatrixTileBytes);
    multiply_bfloat16<0, 1, 2>();
  }
  store_tile<0>(by_key, kMatrixTileBytes);
  zero_tile<0>();
  zero_tile<1>();
  zero_tile<2>();
  F32 square[kLanes];
  for (int i = 0; i < kLanes; ++i) square[i] = load(by_key + i * kMatrixTileColumns);
  transpose(square);
  for (int64_t row = 0; row < rows; ++row) {
    store(scores + row * kScoreStride, square[row]);
  }
}

// The values of a block to pairs [16, size]; values outside the range are not read and become 0.
template <Ahead kAhead, class Tokens, class Lines>
inline void pair_values(const Tokens& values, KeyRange range, int64_t size, uint32_t* pairs,
                        Lines* lines) {
  for (int64_t key = 0; key < MatrixRows::kBlockKeys; key += 2, pairs += size) {
    const BFloat16* row[2];
    for (int64_t i = 0; i < 2; ++i) {
      const bool in_range = key + i >= range.begin && key + i < range.end;
      row[i] = in_range ? values.row(key + i) : nullptr;
    }
    for (int64_t at = 0; at < size; at += MatrixRows::kVectorSize) {
      lines->template keep_pace<kAhead, 2 * kMatrixTileBytes>(at);
      const auto read = [&](const BFloat16* from) {
        return from == nullptr ? _mm512_setzero_si512() : _mm512_loadu_si512(from + at);
      };
      __m512i first, last;
      interleave_pairs(read(row[0]), read(row[1]), &first, &last);
      _mm512_storeu_si512(pairs + at, first);
      _mm512_storeu_si512(pairs + at + 16, last);
    }
  }
}

// out[row] += weights[row][32 keys] * pairs for the rows of a strip.
inline void add_value_tiles(const BFloat16* weights, const uint32_t* pairs, int64_t size,
                            float* out, int64_t out_stride) {
  load_tile<4>(weights, kScoreStride * sizeof(BFloat16));
  for (int64_t at = 0; at < size; at += kMatrixTileColumns) {
    load_tile<3>(out + at, 4 * out_stride);
    load_tile<5>(pairs + at, 4 * size);
    multiply_bfloat16<3, 4, 5>();
    store_tile<3>(out + at, 4 * out_stride);
  }
  zero_tile<3>();
  zero_tile<4>();
  zero_tile<5>();
}

#endif

}  // namespace lmdecode::LMD_SIMD::attention
