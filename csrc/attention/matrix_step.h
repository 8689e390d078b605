// One step of attention by tiles of the matrix units: products of tiles, and among them, as tiles
// and vectors work side by side, scores that become weights.
#pragma once

#include <limits>

#include "attention/attention_workspace.h"
#include "attention/online_softmax.h"
#include "simd/matrix_tiles.h"

namespace lmdecode::LMD_SIMD::attention {

using namespace lmdecode::attention;

#if defined(LMD_SIMD_AVX512_AMX)

// a: register 4, b: 2, c: 0 and 1, 6 and 7 in turn. Those not in use are zeroed, and so free.
inline TileConfig matrix_attention_config() {
  TileConfig config;
  for (int tile = 0; tile < kTileRegisters; ++tile) {
    config.set(tile, kMatrixTileRows, kMatrixTileBytes);
  }
  return config;
}

// 2^x within 8e-5, relative, a 26th of the rounding to bfloat16; 0 below the normal numbers, where
// these are flushed; NaN for NaN.
inline __m512 rough_exp2(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.07802449f), f, _mm512_set1_ps(0.22606721f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.69583352f));
  return _mm512_scalef_ps(_mm512_fmadd_ps(p, f, _mm512_set1_ps(0.99992522f)), x);
}

// c (+)= a b for two tiles of rows and some tiles of columns, along a depth of tiles. Without
// columns there is nothing to do.
struct MatrixProduct {
  const char* a;  // [32], a_stride bytes apart; 64 bytes along the depth
  int64_t a_stride;
  const char* b;  // tiles, some bytes apart along the depth and by columns
  int64_t b_depth_stride, b_column_stride;
  int64_t depth, columns;
  float* c;  // tiles, some floats apart by columns and by rows, their rows c_stride bytes apart
  int64_t c_column_stride, c_rows_stride, c_stride;
};

// Rows of a block that become weights, in bfloat16, in the place of their scores.
struct MatrixWeights {
  static constexpr int64_t kKeys = kMatrixBlockKeys, kSumLanes = 16;

  float* scores;   // [rows, 64]
  float* maximum;  // [rows], so far, in exponents of two
  // [rows], of exponents: minus the maximum; infinite where it is minus infinity or large, so that
  // all keys of the block are looked at.
  float* shift;
  // [rows, 16]: of the weights as they multiply the values, so that a lone large one stays exact;
  // and before rounding, or null.
  float *sums, *exact_sums;
  float* shares;  // [rows]: of what a row had before, where its maximum rose
  int64_t rows;
};

class MatrixStep {
 public:
  // factor: from scores to exponents of two.
  explicit MatrixStep(float factor) : factor_(factor) {}

  // c += a b of `outputs`, then c = a b of `scores`, beside the weights. A bit for each row whose
  // maximum rose: what it has in its outputs counts by its share.
  uint32_t run(const MatrixProduct& outputs, const MatrixProduct& scores,
               const MatrixWeights& weights) const {
    Rows rows = {weights, 0, factor_, _mm512_set1_ps(factor_), 0};
    constexpr int64_t kFewSteps = 24;  // of the depths of all columns, for two rows of weights each
    if (outputs.depth * outputs.columns + scores.depth * scores.columns <= kFewSteps) {
      multiply<true, 2>(outputs, &rows);
      multiply<false, 2>(scores, &rows);
    } else {
      multiply<true, 1>(outputs, &rows);
      multiply<false, 1>(scores, &rows);
    }
    while (rows.row < rows.w.rows) add_row(&rows, []<int kPart>() {});
    return rows.raised;
  }

 private:
  struct Rows {
    MatrixWeights w;
    int64_t row;
    float factor;
    __m512 factors;
    uint32_t raised;
  };

  template <bool kAdds, int kRowsOfStep>
  [[gnu::always_inline]] static void multiply(const MatrixProduct& p, Rows* rows) {
    if (p.columns == 0) return;
    float* done = nullptr;
    for (int64_t column = 0; column < p.columns; column += 2) {
      done = multiply_column<kAdds, kRowsOfStep, 0, 6>(p, column, done, rows);
      if (column + 1 == p.columns) return store_column<0>(p, done);
      done = multiply_column<kAdds, kRowsOfStep, 6, 0>(p, column + 1, done, rows);
    }
    store_column<6>(p, done);
  }

  template <int kC>
  [[gnu::always_inline]] static void store_column(const MatrixProduct& p, float* c) {
    store_half<kC>(p, c);
    store_half<kC + 1>(p, c + p.c_rows_stride);
  }
  // Zeroed, a register is free, and ready for the scores of the column after next.
  template <int kC>
  [[gnu::always_inline]] static void store_half(const MatrixProduct& p, float* c) {
    store_tile<kC>(c, p.c_stride);
    zero_tile<kC>();
  }

  // A column of tiles in the registers kC and kC + 1, while those of the one before, kDone, are
  // stored to `done`, if any.
  template <bool kAdds, int kRowsOfStep, int kC, int kDone>
  [[gnu::always_inline]] static float* multiply_column(const MatrixProduct& p, int64_t column,
                                                       float* done, Rows* rows) {
    float* const c = p.c + column * p.c_column_stride;
    const char *a = p.a, *b = p.b + column * p.b_column_stride;
    for (int64_t k = 0; k < p.depth; ++k, a += kMatrixTileBytes, b += p.b_depth_stride) {
      const auto tiles = [&]<int kPart>() __attribute__((always_inline)) {
        if constexpr (kPart == 0) {
          if (kAdds && k == 0) load_tile<kC>(c, p.c_stride);
          load_passing_tile<2>(b, kMatrixTileBytes);
          load_tile<4>(a, p.a_stride);
          multiply_bfloat16<kC, 4, 2>();
        } else if constexpr (kPart == 1) {
          if (kAdds && k == 0) load_tile<kC + 1>(c + p.c_rows_stride, p.c_stride);
          load_tile<4>(a + kMatrixTileRows * p.a_stride, p.a_stride);
          multiply_bfloat16<kC + 1, 4, 2>();
        } else if (k == 0 && done != nullptr) {
          store_half<kDone + kPart - 2>(p, done + (kPart - 2) * p.c_rows_stride);
        }
      };
      interleave<kRowsOfStep>(rows, tiles);
    }
    return c;
  }

  // Four parts of tiles among rows of weights, as long as there are rows.
  template <int kRowsOfStep, class Tiles>
  [[gnu::always_inline]] static void interleave(Rows* rows, const Tiles& tiles) {
    if (rows->row + kRowsOfStep > rows->w.rows) {
      tiles.template operator()<0>();
      tiles.template operator()<1>();
      tiles.template operator()<2>();
      tiles.template operator()<3>();
    } else if constexpr (kRowsOfStep == 2) {
      add_row(rows, [&]<int kPart>()
                        __attribute__((always_inline)) { tiles.template operator()<kPart>(); });
      add_row(rows, [&]<int kPart>()
                        __attribute__((always_inline)) { tiles.template operator()<2 + kPart>(); });
    } else {
      add_row(rows, [&]<int kPart>() __attribute__((always_inline)) {
        tiles.template operator()<2 * kPart>();
        tiles.template operator()<2 * kPart + 1>();
      });
    }
  }

  // The weights of a row: 64 keys in two parts, with tiles before each.
  template <class Tiles>
  [[gnu::always_inline]] static void add_row(Rows* rows, const Tiles& tiles) {
    const MatrixWeights& w = rows->w;
    const int64_t r = rows->row++;
    float* const scores = w.scores + r * MatrixWeights::kKeys;
    float* const sums = w.sums + r * MatrixWeights::kSumLanes;
    const __m512 shift = _mm512_set1_ps(w.shift[r]);
    tiles.template operator()<0>();
    __m512i first = weigh<0>(scores, rows->factors, shift);
    tiles.template operator()<1>();
    __m512i last = weigh<1>(scores, rows->factors, shift);
    // By value: what functions do not see stays in registers.
    const bool wants_exact = w.exact_sums != nullptr;
    float* const exact_sums = wants_exact ? w.exact_sums + r * MatrixWeights::kSumLanes : nullptr;
    Exponents exponents = {rows->factor, w.shift[r]};
    if (has_above_one(_mm512_max_epu16(first, last))) [[unlikely]] {
      exponents = raise_maximum(scores, rows->factor, w.maximum + r, w.shift + r, w.shares + r,
                                sums, exact_sums);
      rows->raised |= uint32_t{1} << r;
      const __m512 factor = _mm512_set1_ps(exponents.factor);
      const __m512 new_shift = _mm512_set1_ps(exponents.shift);
      first = weigh<0>(scores, factor, new_shift);
      last = weigh<1>(scores, factor, new_shift);
    }
    if (wants_exact) [[unlikely]]
      add_exact(scores, exponents, exact_sums);
    _mm512_store_si512(scores, first);
    _mm512_store_si512(scores + kLanes, last);
    _mm512_store_ps(sums, add_pairs(add_pairs(_mm512_load_ps(sums), first), last));
  }

  template <int kHalf>
  [[gnu::always_inline]] static __m512i weigh(const float* scores, __m512 factor, __m512 shift) {
    const float* const from = scores + kHalf * 2 * kLanes;
    const auto weight = [&](const float* p) __attribute__((always_inline)) {
      return rough_exp2(_mm512_fmadd_ps(_mm512_load_ps(p), factor, shift));
    };
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(weight(from + kLanes), weight(from)));
  }

  // Whether some weight is larger than 1, or NaN. They have no sign, so that their bits tell.
  static bool has_above_one(__m512i weights) {
    return _mm512_cmpgt_epu16_mask(weights, _mm512_set1_epi16(0x3f80)) != 0;
  }

  static __m512 add_pairs(__m512 sum, __m512i pairs) {
    const __m512i odd = _mm512_and_si512(pairs, _mm512_set1_epi32(-0x10000));
    const __m512i even = _mm512_slli_epi32(pairs, 16);
    return _mm512_add_ps(sum, _mm512_add_ps(_mm512_castsi512_ps(even), _mm512_castsi512_ps(odd)));
  }

  // score * factor + shift.
  struct Exponents {
    float factor, shift;
  };

  // Shifts a row by its maximum so far and of this block. Its largest weight is 1 again, which
  // rounding does not change; or near it from a maximum of 2^17 on, which is itself rounded: such
  // rows come here again.
  [[gnu::noinline]] static Exponents raise_maximum(float* scores, float factor, float* maximum,
                                                   float* shift, float* share, float* sums,
                                                   float* exact_sums) {
    F32 top = splat(minus_infinity());  // of NaN and a number max() gives the second, the number
    for (int64_t key = 0; key < MatrixWeights::kKeys; key += kLanes) {
      top = max(load(scores + key), top);
    }
    const float before = *maximum, of_block = reduce_max(top) * factor;
    *share = 1.0f;
    if (of_block > before) {
      *maximum = of_block;
      *share = exp2_of(before - of_block);
      store(sums, load(sums) * splat(*share));
      if (exact_sums != nullptr) store(exact_sums, load(exact_sums) * splat(*share));
    }
    if (!(*maximum > minus_infinity())) return {factor, 0.0f};  // hidden keys and NaN alone
    if (is_large(*maximum)) {
      *shift = std::numeric_limits<float>::infinity();
      subtract_large(scores, 0, MatrixWeights::kKeys, factor, *maximum);
      return {1.0f, 0.0f};
    }
    *shift = 0.0f - *maximum;
    return {factor, *shift};
  }

  [[gnu::noinline]] static void add_exact(const float* scores, Exponents exponents,
                                          float* exact_sums) {
    const F32 factor = splat(exponents.factor), shift = splat(exponents.shift);
    F32 sum = load(exact_sums);
    for (int64_t key = 0; key < MatrixWeights::kKeys; key += kLanes) {
      sum = sum + exp2_of(multiply_add(load(scores + key), factor, shift));
    }
    store(exact_sums, sum);
  }

  const float factor_;
};

#endif

}  // namespace lmdecode::LMD_SIMD::attention
