// What the kernels of sliding_window_attention on the CPU share: the rows of a tile, the rules of
// their scores, their end.
#pragma once

#include "attention/pack.h"
#include "attention/row_total.h"
#include "attention/score_terms.h"
#include "attention/sliding_window_attention.h"

namespace lmdecode::LMD_SIMD::attention {

using namespace lmdecode::attention;

// T: type of queries and output. Cell: type of keys and values, T or Int8Cell.
template <class T, class Cell = T>
class TileRows {
 protected:
  explicit TileRows(const SlidingWindowAttentionParams& params)
      : p_(params),
        has_terms_(params.mask_type != MaskType::kNone || params.key_padding != nullptr),
        has_rule_(has_terms_ || params.softcap != 0.0f || params.alibi_slopes != nullptr) {}

  void set_tile(const AttentionTile& tile) {
    tile_ = tile;
    rows_ = tile.tokens * p_.group();
  }

  int64_t token_of(int64_t row) const { return tile_.first_token + row / p_.group(); }
  int64_t head_of(int64_t row) const { return tile_.kv_head * p_.group() + row % p_.group(); }

  HeadRow<T> query_of(int64_t row) const {
    const AttentionStrides& s = p_.q_strides;
    const int64_t token = p_.first_query(tile_.sequence) + token_of(row);
    const T* q = static_cast<const T*>(p_.q) + tile_.sequence * s.sequence;
    return {q + head_of(row) * s.head + token * s.token, s.element, p_.head_size};
  }

  // The keys or values first + part, listed in `memory`.
  HeadRows<Cell> step_rows(const void* data, const AttentionStrides& s, int64_t size, int64_t first,
                           KeyRange part, const void** memory) const {
    const Cell** rows = reinterpret_cast<const Cell**>(memory);
    list_rows(p_, data, s, tile_.sequence, tile_.kv_head, {first + part.begin, first + part.end},
              rows + part.begin);
    return {rows, s.element, size};
  }

  // From scores to exponents of two. Where scores are products alone the scale is part of the
  // factor, its sign part of the queries.
  float exponent_factor() const {
    const double scale = static_cast<double>(p_.scale);
    if (has_rule_ || scale == 0.0) return static_cast<float>(kLog2E);
    return static_cast<float>((scale < 0.0 ? -scale : scale) * kLog2E);
  }
  float query_sign() const {
    if (has_rule_) return 1.0f;
    return p_.scale > 0.0f ? 1.0f : p_.scale < 0.0f ? -1.0f : 0.0f;
  }

  // What masks add to the scores of `rows` rows for the keys first + `groups`, of which the rows
  // see those of `seen`; `stride` apart.
  void fill_terms(int64_t first_row, int64_t rows, int64_t first, KeyRange seen, KeyRange groups,
                  float* terms, int64_t stride) const {
    for (int64_t r = 0; r < rows; ++r, terms += stride) {
      for (int64_t key = groups.begin; key < groups.end; ++key) terms[key] = minus_infinity();
      const int64_t row = first_row + r;
      if (row < rows_) {
        row_terms(p_, tile_.sequence, head_of(row), token_of(row), first, seen, terms);
      }
    }
  }

  // Products to scores, of keys first + `groups`; terms: null without masks.
  void apply_rule(int64_t row, int64_t first, KeyRange groups, const float* terms,
                  float* scores) const {
    ScoreRule::of(p_, tile_.sequence, head_of(row), token_of(row), first, terms)
        .apply(scores, groups.begin, groups.end);
  }

  // max: exponent of two; sum: of the weights that multiplied the values, which gave `from`.
  // exact_sum: for lse.
  void finish_row(int64_t row, double max, double sum, double exact_sum, const float* from) const {
    const int64_t token = p_.first_query(tile_.sequence) + token_of(row), head = head_of(row);
    const float* const sink = p_.sinks == nullptr ? nullptr : p_.sinks + head;
    const RowTotal total = RowTotal::of(max, sum, sink);
    T* out = static_cast<T*>(p_.out) + tile_.sequence * p_.out_strides.sequence +
             head * p_.out_strides.head + token * p_.out_strides.token;
    // A row that saw nothing has sums of zero.
    store_quotient(out, from, p_.value_size, total.is_empty() ? 1.0f : total.divisor);
    if (p_.lse != nullptr) {
      p_.lse[tile_.sequence * p_.lse_strides.sequence + head * p_.lse_strides.head +
             token * p_.lse_strides.token] = RowTotal::of(max, exact_sum, sink).lse();
    }
  }

  const SlidingWindowAttentionParams& p_;
  const bool has_terms_, has_rule_;
  AttentionTile tile_ = {};
  int64_t rows_ = 0;
};

}  // namespace lmdecode::LMD_SIMD::attention
