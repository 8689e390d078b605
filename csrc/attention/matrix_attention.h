// sliding_window_attention by tiles of the matrix units, in bfloat16.
//
// A strip is 32 rows, two tiles; its keys come in blocks of 64, which begin at multiples of that.
// Keys and values of a span, some blocks that stay in L2, are packed to tiles, and all strips of
// the tile pass over it. A step has three blocks at hand, so that the tiles multiply while vectors
// compute weights:
//
//   block i - 1   outputs += weights * values
//   block i       scores to weights, in bfloat16, in their place; sums of the rounded weights
//   block i + 1   scores = queries * keys
//
// Exponents are shifted by the maximum so far of their row. No maximum is taken before weights are
// computed: where one of them turns out to be larger than 1 the row is shifted anew and computed
// again, and what it has so far is scaled. That is seldom, but for the first keys of a row. What
// happens to a row depends on the row alone: its bits do not change with the rows beside it, spans
// or tiles.
#pragma once

#include <limits>

#include "attention/attention_workspace.h"
#include "attention/matrix_step.h"
#include "attention/tile_rows.h"
#include "common/float_mode.h"

namespace lmdecode::LMD_SIMD::attention {

using namespace lmdecode::attention;

#if defined(LMD_SIMD_AVX512_AMX)

// T: type of queries, keys, values and output; float32 is rounded to bfloat16.
template <class T>
class MatrixAttention : TileRows<T> {
  using Rows = TileRows<T>;
  using Rows::has_rule_;
  using Rows::has_terms_;
  using Rows::p_;
  using Rows::rows_;
  using Rows::tile_;

 public:
  // `memory`: matrix_attention_bytes() of the most rows that a tile has, aligned to 64.
  MatrixAttention(const SlidingWindowAttentionParams& params, int64_t most_rows, void* memory)
      : Rows(params),
        size_(MatrixAttentionSizes::of(params.head_size, params.value_size)),
        step_(this->exponent_factor()) {
    size_.split(memory, most_rows, &w_);
  }

  void run(const AttentionTile& tile) {
    this->set_tile(tile);
    const KeyRange seen = start_strips();
    const int64_t span = size_.span_keys();
    for (int64_t first = seen.begin / kKeys * kKeys; first < seen.end; first += span) {
      span_ = {first, min_of(first + span, seen.end)};
      for (int64_t key = first; key < span_.end; key += kKeys) {
        pack_block(key, part_of_range(seen, key, key + kKeys));
      }
      next_strip_ = 0;
      next_key_ = first;
      const ScopedFlushMode flush;  // of weights: a subnormal one costs some processors an assist
      attend_span();
    }
    finish_strips();
  }

 private:
  static constexpr int64_t kRows = kMatrixStripRows, kKeys = kMatrixBlockKeys;
  static constexpr int64_t kTileFloats = kMatrixTileRows * kMatrixTileColumns;
  static constexpr int64_t kTileBytes = 4 * kTileFloats;
  static constexpr int64_t kRowLanes = MatrixWeights::kSumLanes;
  static_assert(kRows == 2 * kMatrixTileRows && kTileFloats == 256 && kRowLanes == 16);

  using Strip = MatrixAttentionStrip;

  // A block of keys for a strip; without a strip there is none.
  struct Item {
    Strip* strip = nullptr;
    int64_t key = 0;
    bool is_edge = false;          // some row does not see all of the block, or has a rule
    const float* terms = nullptr;  // [rows, keys], of masks
  };

  // ---- the beginning and the end of rows

  // Packs the queries, empties the sums; the keys that some row sees.
  KeyRange start_strips() {
    KeyRange seen = {0, 0};
    strips_ = (rows_ + kRows - 1) / kRows;
    for (int64_t i = 0; i < strips_; ++i) {
      Strip& s = w_.strips[i];
      s.first_row = i * kRows;
      s.rows = min_of(kRows, rows_ - s.first_row);
      s.seen = {0, 0};
      s.seen_by_all = {0, int64_t{1} << 62};
      for (int64_t r = 0; r < s.rows; ++r) start_row(&s, r);
      // The rows beyond are multiplied, too.
      uint32_t* const queries = queries_of(s);
      for (int64_t i = s.rows * query_stride(); i < kRows * query_stride(); ++i) queries[i] = 0;
      float* const out = out_of(s);
      for (int64_t i = 0; i < size_.columns * 2 * kTileFloats; ++i) out[i] = 0.0f;
      for (int64_t i = 0; i < kRows * kRowLanes; ++i) s.sums[i] = s.exact_sums[i] = 0.0f;
      seen = hull(seen, s.seen);
    }
    return seen;
  }

  void start_row(Strip* s, int64_t r) {
    const int64_t row = s->first_row + r;
    const KeyRange range = p_.keys_seen(tile_.sequence, this->token_of(row));
    s->range[r] = range;
    s->maximum[r] = minus_infinity();
    s->shift[r] = std::numeric_limits<float>::infinity();
    s->seen = hull(s->seen, range);
    s->seen_by_all = {max_of(s->seen_by_all.begin, range.begin),
                      min_of(s->seen_by_all.end, range.end)};
    pack_query<BFloat16Pairs>(this->query_of(row), this->query_sign(),
                              queries_of(*s) + r * query_stride());
  }

  void finish_strips() {
    const bool wants_lse = p_.lse != nullptr;
    for (int64_t i = 0; i < strips_; ++i) {
      const Strip& s = w_.strips[i];
      for (int64_t r = 0; r < s.rows; ++r) {
        const double sum = OnlineSoftmax::sum_of_lanes(s.sums + r * kRowLanes);
        const double exact =
            wants_lse ? OnlineSoftmax::sum_of_lanes(s.exact_sums + r * kRowLanes) : sum;
        float* const row = w_.row;
        for (int64_t column = 0; column < size_.columns; ++column) {
          // -0 becomes 0: it would depend on the blocks that the rows beside see.
          store(row + column * kMatrixTileColumns, load(out_at(s, r, column)) + splat(0.0f));
        }
        this->finish_row(s.first_row + r, static_cast<double>(s.maximum[r]), sum, exact, row);
      }
    }
  }

  // ---- places

  int64_t query_stride() const { return size_.depth * kMatrixTileColumns; }
  uint32_t* queries_of(const Strip& s) const {
    return w_.queries + (&s - w_.strips) * kRows * query_stride();
  }
  // Tiles [columns, 2, 16, 16].
  float* out_of(const Strip& s) const {
    return w_.out + (&s - w_.strips) * size_.columns * 2 * kTileFloats;
  }
  float* out_at(const Strip& s, int64_t r, int64_t column) const {
    return out_of(s) + (column * 2 + r / kMatrixTileRows) * kTileFloats +
           r % kMatrixTileRows * kMatrixTileColumns;
  }
  // Tiles of keys [keys / 16, depth], of pairs along the head by key, and of values
  // [keys / 32, columns], of pairs of keys by element.
  uint32_t* keys_at(int64_t key) const {
    return w_.keys + (key - span_.begin) / kMatrixTileColumns * size_.depth * kTileFloats;
  }
  uint32_t* values_at(int64_t key) const {
    return w_.values + (key - span_.begin) / (2 * kMatrixTileRows) * size_.columns * kTileFloats;
  }

  // The keys first + part of a block, zeros around them.
  void pack_block(int64_t first, KeyRange part) {
    const void* memory[kKeys];
    const HeadRows<T> keys = this->step_rows(p_.k, p_.k_strides, p_.head_size, first, part, memory);
    const auto pairs_of = [&](const HeadRows<T>& rows, int64_t key, int64_t at) {
      return key >= part.begin && key < part.end ? load_pairs(rows.row(key), at) : splat(0.0f);
    };
    uint32_t* to = keys_at(first);
    for (int64_t key = 0; key < kKeys; key += kMatrixTileColumns) {
      for (int64_t at = 0; at < query_stride(); at += kLanes, to += kTileFloats) {
        F32 square[kLanes];
        for (int i = 0; i < kLanes; ++i) square[i] = pairs_of(keys, key + i, at);
        transpose(square);
        for (int i = 0; i < kLanes; ++i) store_vector(to + i * kLanes, square[i]);
      }
    }
    const HeadRows<T> values =
        this->step_rows(p_.v, p_.v_strides, p_.value_size, first, part, memory);
    for (int64_t key = 0; key < kKeys; key += 2) {
      uint32_t* row = values_at(first + key) + key / 2 % kMatrixTileRows * kMatrixTileColumns;
      for (int64_t at = 0; at < size_.columns * kMatrixTileColumns; at += 2 * kLanes) {
        __m512i low, high;
        interleave_pairs(bits_of(pairs_of(values, key, at / 2)),
                         bits_of(pairs_of(values, key + 1, at / 2)), &low, &high);
        _mm512_store_si512(row, low);
        row += kTileFloats;
        if (at + kLanes < size_.columns * kMatrixTileColumns) _mm512_store_si512(row, high);
        row += kTileFloats;
      }
    }
  }
  static __m512i bits_of(F32 a) { return _mm512_castps_si512(a.v); }

  // ---- the blocks of a span, strip by strip

  void attend_span() {
    Item before, now, next = next_item(0);
    for (int turn = 1; before.strip != nullptr || now.strip != nullptr || next.strip != nullptr;
         turn = 1 - turn) {
      float* const scores = w_.scores + turn * kRows * kKeys;
      if (now.is_edge) finish_scores(now, scores);
      float* const other = w_.scores + (1 - turn) * kRows * kKeys;
      const uint32_t raised =
          step_.run(outputs_of(before, other), scores_of(next, other), weights_of(now, scores));
      if (raised != 0) scale_outputs(*now.strip, raised);
      before = now;
      now = next;
      next = next_item(turn);
    }
  }

  // turn: of the terms that may be overwritten.
  Item next_item(int turn) {
    for (; next_strip_ < strips_; ++next_strip_, next_key_ = span_.begin) {
      Strip& s = w_.strips[next_strip_];
      next_key_ = max_of(next_key_, s.seen.begin / kKeys * kKeys);
      const int64_t end = min_of(s.seen.end, span_.end);
      while (next_key_ < end) {
        const int64_t key = next_key_;
        next_key_ += kKeys;
        const bool is_inside = key >= s.seen_by_all.begin && key + kKeys <= s.seen_by_all.end;
        Item item = {&s, key, has_rule_ || !is_inside, nullptr};
        if (has_terms_) {
          float* const terms = w_.terms + turn * kRows * kKeys;
          const KeyRange all = {0, kKeys};
          this->fill_terms(s.first_row, s.rows, key, part_of_range(s.seen, key, key + kKeys), all,
                           terms, kKeys);
          const KeyRange visible =
              groups_with_visible_keys<kKeyGroup>(terms, kKeys, s.rows, 0, kKeys);
          if (visible.begin == visible.end) continue;
          item.terms = terms;
        }
        return item;
      }
    }
    return {};
  }

  // Products to scores: rules and hidden keys.
  void finish_scores(const Item& item, float* scores) {
    const Strip& s = *item.strip;
    for (int64_t r = 0; r < s.rows; ++r, scores += kKeys) {
      if (has_rule_) {
        const float* const terms = item.terms == nullptr ? nullptr : item.terms + r * kKeys;
        this->apply_rule(s.first_row + r, item.key, {0, kKeys}, terms, scores);
      }
      hide_outside(scores, 0, kKeys, part_of_range(s.range[r], item.key, item.key + kKeys));
    }
  }

  // ---- a step

  // Nothing where there is no block.
  MatrixProduct outputs_of(const Item& item, const float* weights) const {
    if (item.strip == nullptr) return {};
    return {reinterpret_cast<const char*>(weights),
            4 * kKeys,
            reinterpret_cast<const char*>(values_at(item.key)),
            size_.columns * kTileBytes,
            kTileBytes,
            kKeys / (2 * kMatrixTileRows),
            size_.columns,
            out_of(*item.strip),
            2 * kTileFloats,
            kTileFloats,
            kMatrixTileBytes};
  }
  MatrixProduct scores_of(const Item& item, float* scores) const {
    if (item.strip == nullptr) return {};
    return {reinterpret_cast<const char*>(queries_of(*item.strip)),
            4 * query_stride(),
            reinterpret_cast<const char*>(keys_at(item.key)),
            kTileBytes,
            size_.depth * kTileBytes,
            size_.depth,
            kKeys / kMatrixTileColumns,
            scores,
            kMatrixTileColumns,
            kMatrixTileRows * kKeys,
            4 * kKeys};
  }
  MatrixWeights weights_of(const Item& item, float* scores) const {
    Strip* const s = item.strip;
    if (s == nullptr) return {};
    float* const exact_sums = p_.lse == nullptr ? nullptr : s->exact_sums;
    return {scores, s->maximum, s->shift, s->sums, exact_sums, s->shares, s->rows};
  }

  // Of the rows whose bits are set, after the products with all blocks before.
  void scale_outputs(const Strip& s, uint32_t raised) {
    for (; raised != 0; raised &= raised - 1) {
      const int64_t r = __builtin_ctz(raised);
      for (int64_t column = 0; column < size_.columns; ++column) {
        float* const p = out_at(s, r, column);
        store(p, load(p) * splat(s.shares[r]));
      }
    }
  }

  const MatrixAttentionSizes size_;
  const MatrixStep step_;
  MatrixAttentionWorkspace w_ = {};
  int64_t strips_ = 0;
  KeyRange span_ = {0, 0};
  int64_t next_strip_ = 0, next_key_ = 0;
};

#endif

}  // namespace lmdecode::LMD_SIMD::attention
