// sliding_window_attention on the CPU, compiled once for each CPU capability. See simd/vec.h.
//
// A tile has some queries of a sequence with all query heads of one KV head as its rows, token by
// token, six rows a strip (16 by tiles of the matrix units). Keys and values come in steps of
// kStepKeys, packed once for all of the tile's rows; within a step each strip takes the groups of
// keys that its own rows see: scores, softmax with the maximum so far, and the product with the
// values, added to what the strip has.
#pragma once

#include "attention/attention_workspace.h"
#include "attention/online_softmax.h"
#include "attention/pack.h"
#include "attention/score_terms.h"
#include "attention/sliding_window_attention.h"
#if defined(LMD_SIMD_AVX512_AMX)
#include "attention/tile_product.h"
#endif

namespace lmdecode::LMD_SIMD::attention {

using namespace lmdecode::attention;

// T: type of queries and output. Cell: type of keys and values, T or Int8Cell.
template <class T, class Dot, class Cell = T>
class TileAttention {
 public:
  using Element = typename Dot::Element;

  // `memory`: attention_workspace_bytes() of the most rows that a tile has, aligned to 64.
  TileAttention(const SlidingWindowAttentionParams& params, int64_t most_rows, void* memory)
      : p_(params),
        w_(split(params, most_rows, memory)),
        has_terms_(params.mask_type != MaskType::kNone || params.key_padding != nullptr),
        has_rule_(has_terms_ || params.softcap != 0.0f || params.alibi_slopes != nullptr),
        softmax_(w_.row_max, w_.row_sum, exponent_factor_of(params, has_rule_)),
        depth_(depth_of<Dot>(params.head_size)),
        query_stride_(padded_size(params.head_size) / Dot::kPerElement),
        out_stride_(padded_size(params.value_size)),
        value_columns_((params.value_size + kKeyGroup - 1) / kKeyGroup * kKeyGroup) {}

  void run(const AttentionTile& tile) {
    tile_ = tile;
    rows_ = tile.tokens * p_.group();
    const KeyRange seen = start_rows();
    for (int64_t first = seen.begin / kStep * kStep; first < seen.end; first += kStep) {
      const KeyRange part = part_of_range(seen, first, first + kStep);
      pack_keys<Dot>(step_rows(p_.k, p_.k_strides, p_.head_size, first, part, w_.key_rows), part,
                     reinterpret_cast<Element*>(w_.keys));
      pack_values<Dot>(step_rows(p_.v, p_.v_strides, p_.value_size, first, part, w_.value_rows),
                       part, reinterpret_cast<Element*>(w_.values));
      for (int64_t row = 0; row < rows_; row += kTileRowCount) run_strip(row, first);
    }
    finish_rows();
  }

 private:
  static constexpr int64_t kStep = tuning::kStepKeys;
  // A score is the sum of one chain of additions for each 128 elements of the head, in their order:
  // one chain for all of a head of 512 has twice the rounding error. Tiles have a chain for each 32
  // elements by themselves; so have levels that round products before they add them.
  static constexpr int64_t kChain =
      Dot::kDepthUnit > 1 ? int64_t{1} << 30 : (kHasFusedProducts ? 128 : 32) / Dot::kPerElement;

  static AttentionWorkspace split(const SlidingWindowAttentionParams& params, int64_t rows,
                                  void* memory) {
    AttentionWorkspace w = {};
    split_attention_workspace(memory, rows, params.head_size, params.value_size, &w);
    return w;
  }

  // Where scores are products alone the scale is part of the factor, its sign part of the queries.
  static float exponent_factor_of(const SlidingWindowAttentionParams& params, bool has_rule) {
    const double scale = static_cast<double>(params.scale);
    if (has_rule || scale == 0.0) return static_cast<float>(kLog2E);
    return static_cast<float>((scale < 0.0 ? -scale : scale) * kLog2E);
  }
  float query_sign() const {
    if (has_rule_) return 1.0f;
    return p_.scale > 0.0f ? 1.0f : p_.scale < 0.0f ? -1.0f : 0.0f;
  }

  // The keys or values first + part, listed in `memory`.
  HeadRows<Cell> step_rows(const void* data, const AttentionStrides& s, int64_t size, int64_t first,
                           KeyRange part, const void** memory) const {
    const Cell** rows = reinterpret_cast<const Cell**>(memory);
    list_rows(p_, data, s, tile_.sequence, tile_.kv_head, {first + part.begin, first + part.end},
              rows + part.begin);
    return {rows, s.element, size};
  }

  int64_t token_of(int64_t row) const { return tile_.first_token + row / p_.group(); }
  int64_t head_of(int64_t row) const { return tile_.kv_head * p_.group() + row % p_.group(); }
  KeyRange range_of(int64_t row) const { return {w_.row_begin[row], w_.row_end[row]}; }

  // Packs the queries, empties the sums; the keys that some row sees.
  KeyRange start_rows() {
    const AttentionStrides& s = p_.q_strides;
    const T* q = static_cast<const T*>(p_.q) + tile_.sequence * s.sequence +
                 p_.first_query(tile_.sequence) * s.token;
    Element* queries = reinterpret_cast<Element*>(w_.queries);
    const int64_t padded = (rows_ + kTileRowCount - 1) / kTileRowCount * kTileRowCount;
    KeyRange seen = {0, 0}, of_token = {0, 0};
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t token = token_of(row);
      if (row % p_.group() == 0) {
        of_token = p_.keys_seen(tile_.sequence, token);
        seen = hull(seen, of_token);
      }
      w_.row_begin[row] = of_token.begin;
      w_.row_end[row] = of_token.end;
      const HeadRow<T> query = {q + head_of(row) * s.head + token * s.token, s.element,
                                p_.head_size};
      pack_query<Dot>(query, query_sign(), queries + row * query_stride_);
    }
    for (int64_t row = rows_; row < padded; ++row) {
      w_.row_begin[row] = w_.row_end[row] = 0;
      for (int64_t i = 0; i < query_stride_; ++i) queries[row * query_stride_ + i] = Element{};
    }
    for (int64_t i = 0; i < padded * out_stride_; ++i) w_.out[i] = 0.0f;
    softmax_.reset(padded);
    return seen;
  }

  void run_strip(int64_t first_row, int64_t first) {
    KeyRange part[kTileRowCount], seen = {0, 0};
    for (int r = 0; r < kTileRowCount; ++r) {
      part[r] = part_of_range(range_of(first_row + r), first, first + kStep);
      seen = hull(seen, part[r]);
    }
    if (seen.begin == seen.end) return;
    KeyRange groups = {seen.begin / kKeyGroup * kKeyGroup,
                       (seen.end + kKeyGroup - 1) / kKeyGroup * kKeyGroup};
    if (has_terms_) {
      groups = find_terms(first_row, first, seen, groups);
      if (groups.begin == groups.end) return;
      seen = {max_of(seen.begin, groups.begin), min_of(seen.end, groups.end)};
    }
    multiply_keys(first_row, groups);
    Element* weights = reinterpret_cast<Element*>(weights_in());
    for (int r = 0; r < kTileRowCount; ++r) {
      const int64_t row = first_row + r;
      float* scores = w_.scores + r * kStep;
      if (has_rule_ && row < rows_) apply_rule(row, first, r, groups);
      if (part[r].begin > groups.begin || part[r].end < groups.end) {
        hide_outside(scores, groups.begin, groups.end, part[r]);
      }
      add_row(row, scores, groups, weights + r * (kStep / Dot::kPerElement));
      if constexpr (Dot::kDepthUnit > 1) {
        Element* const of_row = weights + r * (kStep / Dot::kPerElement);
        const KeyRange all = elements_of<Dot>(groups);
        for (int64_t i = all.begin; i < groups.begin / Dot::kPerElement; ++i) of_row[i] = 0;
        for (int64_t i = groups.end / Dot::kPerElement; i < all.end; ++i) of_row[i] = 0;
      }
    }
    multiply_values(first_row, seen, weights);
  }

  // Weights are in the place of the scores where they are floats.
  void* weights_in() const {
    return Dot::kPerElement == 1 ? static_cast<void*>(w_.scores) : static_cast<void*>(w_.weights);
  }

  void add_row(int64_t row, const float* scores, KeyRange groups, Element* weights) {
    float* out = w_.out + row * out_stride_;
    if constexpr (Dot::kPerElement == 1) {
      softmax_.add(row, scores, groups.begin, groups.end, out, value_columns_,
                   [&](int64_t key, F32 weight) { store(weights + key, weight); });
    } else {
#if defined(LMD_SIMD_AVX512_BF16)
      softmax_.add(row, scores, groups.begin, groups.end, out, value_columns_,
                   [&](int64_t key, F32 weight) {
                     _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + key / 2),
                                         reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(weight.v)));
                   });
#endif
    }
  }

  void multiply_keys(int64_t first_row, KeyRange groups) {
    const Element* queries = reinterpret_cast<Element*>(w_.queries) + first_row * query_stride_;
    for (int64_t key = groups.begin; key < groups.end;) {
      const int64_t panel = key / kPanelWidth * kPanelWidth;
      const int64_t end = min_of(groups.end, panel + kPanelWidth);
      const Element* keys = reinterpret_cast<Element*>(w_.keys) + panel * depth_ + (key - panel);
      float* scores = w_.scores + key;
      panel_product<Dot, false>(queries, query_stride_, keys, min_of(depth_, kChain), scores, kStep,
                                end - key);
      for (int64_t at = kChain; at < depth_; at += kChain) {
        panel_product<Dot, true>(queries + at, query_stride_, keys + at * kPanelWidth,
                                 min_of(depth_ - at, kChain), scores, kStep, end - key);
      }
      key = end;
    }
  }

  void multiply_values(int64_t first_row, KeyRange seen, const Element* weights) {
    constexpr int64_t kPanelRows = kStep / Dot::kPerElement;
    const auto [begin, end] = elements_of<Dot>(seen);
    for (int64_t at = 0; at < value_columns_; at += kPanelWidth) {
      const Element* values =
          reinterpret_cast<Element*>(w_.values) + at * kPanelRows + begin * kPanelWidth;
      panel_product<Dot, true>(weights + begin, kPanelRows, values, end - begin,
                               w_.out + first_row * out_stride_ + at, out_stride_,
                               min_of(kPanelWidth, value_columns_ - at));
    }
  }

  // The terms of the strip's rows, and the groups in which they leave something to see.
  KeyRange find_terms(int64_t first_row, int64_t first, KeyRange seen, KeyRange groups) {
    for (int r = 0; r < kTileRowCount; ++r) {
      float* terms = w_.terms + r * kStep;
      for (int64_t key = groups.begin; key < groups.end; ++key) terms[key] = minus_infinity();
      const int64_t row = first_row + r;
      if (row < rows_) {
        row_terms(p_, tile_.sequence, head_of(row), token_of(row), first, seen, terms);
      }
    }
    return groups_with_visible_keys<kKeyGroup>(w_.terms, kStep, kTileRowCount, groups.begin,
                                               groups.end);
  }

  void apply_rule(int64_t row, int64_t first, int r, KeyRange groups) {
    ScoreRule rule = {p_.scale, p_.softcap, 0.0f, 0.0f,
                      has_terms_ ? w_.terms + r * kStep : nullptr};
    if (p_.alibi_slopes != nullptr) {
      rule.slope = p_.alibi_slopes[tile_.sequence * p_.alibi_sequence_stride + head_of(row)];
      rule.distance = static_cast<float>(p_.position(tile_.sequence, token_of(row)) - first);
    }
    rule.apply(w_.scores + r * kStep, groups.begin, groups.end);
  }

  void finish_rows() {
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t token = p_.first_query(tile_.sequence) + token_of(row), head = head_of(row);
      const RowTotal total =
          RowTotal::of(static_cast<double>(softmax_.max_of_row(row)), softmax_.sum_of_row(row),
                       p_.sinks == nullptr ? nullptr : p_.sinks + head);
      T* out = static_cast<T*>(p_.out) + tile_.sequence * p_.out_strides.sequence +
               head * p_.out_strides.head + token * p_.out_strides.token;
      // A row that saw nothing has sums of zero.
      store_quotient(out, w_.out + row * out_stride_, p_.value_size,
                     total.is_empty() ? 1.0f : total.divisor);
      if (p_.lse != nullptr) {
        p_.lse[tile_.sequence * p_.lse_strides.sequence + head * p_.lse_strides.head +
               token * p_.lse_strides.token] = total.lse();
      }
    }
  }

  const SlidingWindowAttentionParams& p_;
  const AttentionWorkspace w_;
  const bool has_terms_, has_rule_;
  OnlineSoftmax softmax_;
  const int64_t depth_, query_stride_, out_stride_, value_columns_;
  AttentionTile tile_ = {};
  int64_t rows_ = 0;
};

// Tiles [begin, end), none with more than most_rows rows. `workspace` has
// attention_workspace_bytes() of these, aligned to 64.
void sliding_window_attention_tiles(const SlidingWindowAttentionParams& params,
                                    const AttentionTile* tiles, int64_t begin, int64_t end,
                                    int64_t most_rows, void* workspace);

}  // namespace lmdecode::LMD_SIMD::attention
