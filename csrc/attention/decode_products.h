// The products of decoding: a few queries against the keys and values of a cache, each read once
// for all rows of a tile.
#pragma once

#include "attention/attention_tuning.h"
#include "attention/attention_vec.h"
#include "attention/key_range.h"

namespace lmdecode::LMD_SIMD::attention {

using namespace lmdecode::attention;

// Values that are read for some of their elements before the others.
constexpr int64_t kChunkKeys = 16;
// Floats, or weights, from row to row.
constexpr int64_t kScoreStride = tuning::kSplitKeys;
// Lines are asked for this far ahead, or a block. Much less comes late; twice as much pushes out of
// the first cache what has been asked for.
constexpr int64_t kBytesAhead = 8192;
// At the first line of a page that of a page further on is asked for, too, and so comes into the
// TLB: for a Zen 5, which is up to 30 % faster with it. A Zen 3 is 5 % slower.
constexpr int64_t kPage = 4096, kPagesAhead = 4;
constexpr int64_t kLineBytes = 64;

// Where a tile asks for what comes (DecodePartials::to_first_cache).
enum class Ahead { kNothing, kToSecondCache, kToFirstCache };

// Plain C++ waits for its products, not for memory: it asks for nothing, and takes keys at the edge
// of a range as all others, which leaves a quarter to compile.
#if defined(LMD_SIMD_AVX512) || defined(LMD_SIMD_AVX2)
constexpr bool kIsPlain = false;
#else
constexpr bool kIsPlain = true;
#endif

// Lane i of the result is the sum of the lanes of v[i], in an order that does not depend on i.
[[gnu::always_inline]] inline F32 sum_lanes(const F32 (&v)[kLanes]) {
#if defined(LMD_SIMD_AVX512)
  // Two vectors become one: blend one half of the lanes of each, shuffle the other halves into
  // place and add.
  __m512 a[8], b[4], c[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {  // halves: v[i] | v[i + 8]
    a[i] = _mm512_add_ps(_mm512_mask_blend_ps(0xff00, v[i].v, v[i + 8].v),
                         _mm512_shuffle_f32x4(v[i].v, v[i + 8].v, 0x4e));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // quarters: v[i] | v[i + 4] | v[i + 8] | v[i + 12]
    const __m512 others = _mm512_mask_blend_ps(0x0f0f, a[i], a[i + 4]);
    b[i] = _mm512_add_ps(_mm512_mask_blend_ps(0xf0f0, a[i], a[i + 4]),
                         _mm512_shuffle_f32x4(others, others, 0xb1));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {  // of a quarter: two lanes of v[i], two of v[i + 2]
    c[i] = _mm512_add_ps(_mm512_mask_blend_ps(0xcccc, b[i], b[i + 2]),
                         _mm512_shuffle_ps(b[i], b[i + 2], 0x4e));
  }
  const __m512 others = _mm512_mask_blend_ps(0x5555, c[0], c[1]);
  return {_mm512_add_ps(_mm512_mask_blend_ps(0xaaaa, c[0], c[1]), _mm512_permute_ps(others, 0xb1))};
#elif defined(LMD_SIMD_AVX2)
  __m256 a[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm256_add_ps(_mm256_permute2f128_ps(v[i].v, v[i + 4].v, 0x20),
                         _mm256_permute2f128_ps(v[i].v, v[i + 4].v, 0x31));
  }
  const __m256 b0 = _mm256_add_ps(_mm256_unpacklo_ps(a[0], a[2]), _mm256_unpackhi_ps(a[0], a[2]));
  const __m256 b1 = _mm256_add_ps(_mm256_unpacklo_ps(a[1], a[3]), _mm256_unpackhi_ps(a[1], a[3]));
  return {_mm256_add_ps(_mm256_unpacklo_ps(b0, b1), _mm256_unpackhi_ps(b0, b1))};
#else
  F32 sum;
  for (int i = 0; i < kLanes; ++i) {
    const float* lane = v[i].v;
    sum.v[i] =
        ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
  }
  return sum;
#endif
}

// Rows of T as vectors of floats.
template <class T>
struct FloatRows {
  using Row = T;
  using Query = float;
  using Weight = float;
  static constexpr bool kMultipliesTiles = false;
  static constexpr int64_t kVectorSize = kLanes;  // elements of a row in a vector
  static constexpr int64_t kKeysOfAWeight = 1;
  static constexpr int64_t kBlockKeys = sizeof(T) == 4 ? 16 : 32;  // for a head size of 128 8 KB

  struct Vector {
    F32 v;
  };
  static Vector load_row(const T* p) { return {load(p)}; }
  using Factor = F32;
  static Factor load_query(const float* p) { return load(p); }
  static F32 multiply(F32 c, Factor query, Vector row) { return accumulate(query, row.v, c); }
  static void store_weights(float* p, F32 weight) { store(p, weight); }
};

#if defined(LMD_SIMD_AVX512_BF16)
// Rows of bfloat16, multiplied as pairs: along the head with queries, along the keys with weights.
struct PairRows {
  using Row = BFloat16;
  using Query = BFloat16;
  using Weight = BFloat16;
  static constexpr bool kMultipliesTiles = false;
  static constexpr int64_t kVectorSize = 32;
  static constexpr int64_t kKeysOfAWeight = 2;
  static constexpr int64_t kBlockKeys = 32;

  struct Vector {
    __m512i v;
  };
  static Vector load_row(const BFloat16* p) { return {_mm512_loadu_si512(p)}; }
  using Factor = __m512bh;
  static Factor load_query(const BFloat16* p) {
    return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p));
  }
  static F32 multiply(F32 c, Factor query, Vector row) {
    return {_mm512_dpbf16_ps(c.v, query, reinterpret_cast<__m512bh>(row.v))};
  }
  static void store_weights(BFloat16* p, F32 weight) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(weight.v)));
  }
};
#endif

// Keys or values of a block at a fixed stride.
template <class T>
struct StridedTokens {
  const T* data;
  int64_t stride;

  const T* row(int64_t token) const { return data + token * stride; }
};

// The same wherever they lie.
template <class T>
struct ListedTokens {
  const T* const* rows;  // [Rows::kBlockKeys]: where each begins

  const T* row(int64_t token) const { return rows[token]; }
};

template <Ahead kAhead, class T>
inline void prefetch(const T* p) {
  if constexpr (kAhead == Ahead::kToFirstCache) __builtin_prefetch(p, 0, 3);
  if constexpr (kAhead == Ahead::kToSecondCache) __builtin_prefetch(p, 0, 2);
}

// The lines of a block that is read later, in the order of addresses. Each call of next() asks for
// one: at an even pace beside the work they come faster than together.
template <class Tokens, class T>
struct LinesAhead {
  Tokens tokens;
  int64_t size;   // elements of a row
  int64_t token;  // of the next line
  int64_t last;   // token
  const T* line;
  const T* row_end;

  void start(const Tokens& of_block, KeyRange range, int64_t row_size) {
    tokens = of_block;
    size = row_size;
    token = range.begin;
    last = range.end - 1;
    line = tokens.row(token);
    row_end = line + size;
  }

  template <Ahead kAhead>
  void next() {
    if constexpr (kAhead != Ahead::kNothing) {
      prefetch<kAhead>(line);
      if constexpr (kAhead == Ahead::kToFirstCache) {
        if (reinterpret_cast<uintptr_t>(line) % kPage < kLineBytes) {
          prefetch<Ahead::kToSecondCache>(line + kPagesAhead * kPage / sizeof(T));
        }
      }
      line += kLineBytes / sizeof(T);
      if (line >= row_end) {
        token = min_of(token + 1, last);
        line = tokens.row(token);
        row_end = line + size;
      }
    }
  }

  // Beside kBytes that are read; step: how often it has been called.
  template <Ahead kAhead, int64_t kBytes>
  void keep_pace(int64_t step) {
    if constexpr (kAhead == Ahead::kNothing) return;
    if constexpr (kBytes >= kLineBytes) {
#pragma GCC unroll 8
      for (int64_t i = 0; i < kBytes; i += kLineBytes) next<kAhead>();
    } else {
      if (step % (kLineBytes / kBytes) == 0) next<kAhead>();
    }
  }
};

// scores[row][key] for kRows queries and the kLanes / kRows keys from `key` on; a key outside
// [range.begin, range.end) is replaced by another one. Queries: [vectors of the head, rows].
template <class Rows, int kRows, bool kAtEdge, Ahead kAhead, class Tokens, class Lines>
inline void score_tile(const typename Rows::Query* queries, const Tokens& keys, KeyRange range,
                       int64_t key, int64_t size, float* scores, Lines* lines) {
  constexpr int kKeys = kLanes / kRows;
  // Keys that a query is loaded for. With few rows it is key by key: lines are then read in the
  // order in which they lie.
  constexpr int kTogether = kRows >= 4 ? kKeys : 1;
  constexpr int64_t kBytes = kTogether * Rows::kVectorSize * sizeof(typename Rows::Row);
  F32 sum[kLanes];
#pragma GCC unroll 16
  for (int first = 0; first < kKeys; first += kTogether) {
    const typename Rows::Row* row[kTogether];
#pragma GCC unroll 4
    for (int i = 0; i < kTogether; ++i) {
      const int64_t at = key + first + i;
      const int64_t token = kAtEdge ? min_of(max_of(at, range.begin), range.end - 1) : at;
      row[i] = keys.row(token);
    }
    F32 of_keys[kTogether][kRows];
#pragma GCC unroll 4
    for (int i = 0; i < kTogether; ++i) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) of_keys[i][r] = splat(0.0f);
    }
    const typename Rows::Query* query = queries;
    for (int64_t at = 0; at < size; at += Rows::kVectorSize, query += kRows * Rows::kVectorSize) {
      lines->template keep_pace<kAhead, kBytes>(at / Rows::kVectorSize);
      typename Rows::Vector vector[kTogether];
#pragma GCC unroll 4
      for (int i = 0; i < kTogether; ++i) vector[i] = Rows::load_row(row[i] + at);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const typename Rows::Factor factor = Rows::load_query(query + r * Rows::kVectorSize);
#pragma GCC unroll 4
        for (int i = 0; i < kTogether; ++i) {
          of_keys[i][r] = Rows::multiply(of_keys[i][r], factor, vector[i]);
        }
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kTogether; ++i) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sum[r * kKeys + first + i] = of_keys[i][r];
    }
  }
  alignas(64) float lane[kLanes];
  store(lane, sum_lanes(sum));
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    __builtin_memcpy(scores + r * kScoreStride + key, lane + r * kKeys, kKeys * sizeof(float));
  }
}

// out[row] += weights[row][key] * values[key] for kRows rows, kVectors vectors of each, and the
// keys of a range.
template <class T, int kRows, int kVectors, Ahead kAhead, class Tokens, class Lines>
inline void add_values(const float* weights, const Tokens& values, KeyRange range, int64_t at,
                       float* out, int64_t out_stride, Lines* lines) {
  F32 sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) sum[r][j] = splat(0.0f);
  }
  for (int64_t key = range.begin; key < range.end; ++key) {
    lines->template keep_pace<kAhead, kVectors * kLanes * int64_t{sizeof(T)}>(key);
    const T* row = values.row(key) + at;
    F32 value[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) value[j] = load(row + j * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const F32 weight = splat(weights[r * kScoreStride + key]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[r][j] = accumulate(weight, value[j], sum[r][j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      float* to = out + r * out_stride + at + j * kLanes;
      store(to, load(to) + sum[r][j]);
    }
  }
}

template <class Rows, int kRows, Ahead kAhead, class Tokens, class Lines>
  requires(Rows::kKeysOfAWeight == 1)
void add_all_values(const typename Rows::Weight* weights, const Tokens& values, KeyRange range,
                    int64_t size, float* out, int64_t out_stride, Lines* lines) {
  using T = typename Rows::Row;
  // As many sums as there are registers for.
  constexpr int kVectors = (kLanes == 16 ? 4 : 2) / (kRows == 8 ? 2 : 1);
  for (int64_t at = 0; at < size;) {
    if (at + kVectors * kLanes <= size) {
      add_values<T, kRows, kVectors, kAhead>(weights, values, range, at, out, out_stride, lines);
      at += kVectors * kLanes;
    } else {
      add_values<T, kRows, 1, kAhead>(weights, values, range, at, out, out_stride, lines);
      at += kLanes;
    }
  }
}

#if defined(LMD_SIMD_AVX512_BF16)
// The same for pairs of keys; kVectors vectors of 32 elements.
template <int kRows, int kVectors, Ahead kAhead, class Tokens, class Lines>
inline void add_value_pairs(const BFloat16* weights, const Tokens& values, KeyRange range,
                            int64_t at, float* out, int64_t out_stride, Lines* lines) {
  // Pairs come out of the interleaving with the elements 0-3, 8-11, ... in the one vector and 4-7,
  // 12-15, ... in the other.
  const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
  const __m512i second =
      _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
  __m512 low[kRows][kVectors], high[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) {
      low[r][j] = high[r][j] = _mm512_setzero_ps();
    }
  }
  for (int64_t key = range.begin / 2 * 2; key < range.end; key += 2) {
    lines->template keep_pace<kAhead, kVectors * 128>(key);
    // A pair at an end of the range has one key; the other one is zeros.
    const bool has_a = key >= range.begin, has_b = key + 1 < range.end;
    const BFloat16* row_a = values.row(has_a ? key : key + 1) + at;
    const BFloat16* row_b = values.row(has_b ? key + 1 : key) + at;
    __m512bh lows[kVectors], highs[kVectors];
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) {
      const __m512i a = _mm512_maskz_loadu_epi32(has_a ? 0xffff : 0, row_a + 32 * j);
      const __m512i b = _mm512_maskz_loadu_epi32(has_b ? 0xffff : 0, row_b + 32 * j);
      lows[j] = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(a, b));
      highs[j] = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(a, b));
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      int32_t pair;
      __builtin_memcpy(&pair, weights + r * kScoreStride + key, sizeof(pair));
      const __m512bh weight = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) {
        low[r][j] = _mm512_dpbf16_ps(low[r][j], weight, lows[j]);
        high[r][j] = _mm512_dpbf16_ps(high[r][j], weight, highs[j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) {
      float* p = out + r * out_stride + at + 32 * j;
      const __m512 a = _mm512_permutex2var_ps(low[r][j], first, high[r][j]);
      const __m512 b = _mm512_permutex2var_ps(low[r][j], second, high[r][j]);
      _mm512_storeu_ps(p, _mm512_add_ps(_mm512_loadu_ps(p), a));
      _mm512_storeu_ps(p + 16, _mm512_add_ps(_mm512_loadu_ps(p + 16), b));
    }
  }
}

template <class Rows, int kRows, Ahead kAhead, class Tokens, class Lines>
  requires(Rows::kKeysOfAWeight == 2)
void add_all_values(const BFloat16* weights, const Tokens& values, KeyRange range, int64_t size,
                    float* out, int64_t out_stride, Lines* lines) {
  constexpr int kVectors = kRows == 8 ? 1 : 2;  // as many sums as there are registers for
  for (int64_t at = 0; at < size;) {
    if (at + 32 * kVectors <= size) {
      add_value_pairs<kRows, kVectors, kAhead>(weights, values, range, at, out, out_stride, lines);
      at += 32 * kVectors;
    } else {
      add_value_pairs<kRows, 1, kAhead>(weights, values, range, at, out, out_stride, lines);
      at += 32;
    }
  }
}
#endif

}  // namespace lmdecode::LMD_SIMD::attention
