// sliding_window_attention on the CPU, compiled once for each CPU capability. See simd/vec.h.
//
// A tile has some queries of a sequence with all query heads of one KV head as its rows, token by
// token, six rows a strip. Keys and values come in steps of kStepKeys, packed once for all of the
// tile's rows; within a step each strip takes the groups of keys that its own rows see: scores,
// softmax with the maximum so far, and the product with the values, added to what the strip has.
#pragma once

#include "attention/attention_workspace.h"
#include "attention/online_softmax.h"
#include "attention/sliding_window_attention.h"
#include "attention/tile_rows.h"

namespace lmdecode::LMD_SIMD::attention {

using namespace lmdecode::attention;

template <class T, class Dot, class Cell = T>
class TileAttention : TileRows<T, Cell> {
  using Rows = TileRows<T, Cell>;
  using Rows::has_rule_;
  using Rows::has_terms_;
  using Rows::p_;
  using Rows::rows_;
  using Rows::tile_;

 public:
  using Element = typename Dot::Element;

  // `memory`: attention_workspace_bytes() of the most rows that a tile has, aligned to 64.
  TileAttention(const SlidingWindowAttentionParams& params, int64_t most_rows, void* memory)
      : Rows(params),
        w_(split(params, most_rows, memory)),
        softmax_(w_.row_max, w_.row_sum, this->exponent_factor()),
        depth_(depth_of<Dot>(params.head_size)),
        query_stride_(padded_size(params.head_size) / Dot::kPerElement),
        out_stride_(padded_size(params.value_size)),
        value_columns_((params.value_size + kKeyGroup - 1) / kKeyGroup * kKeyGroup) {}

  void run(const AttentionTile& tile) {
    this->set_tile(tile);
    const KeyRange seen = start_rows();
    for (int64_t first = seen.begin / kStep * kStep; first < seen.end; first += kStep) {
      const KeyRange part = part_of_range(seen, first, first + kStep);
      pack_keys<Dot>(this->step_rows(p_.k, p_.k_strides, p_.head_size, first, part, w_.key_rows),
                     part, reinterpret_cast<Element*>(w_.keys));
      pack_values<Dot>(
          this->step_rows(p_.v, p_.v_strides, p_.value_size, first, part, w_.value_rows), part,
          reinterpret_cast<Element*>(w_.values));
      for (int64_t row = 0; row < rows_; row += kTileRowCount) run_strip(row, first);
    }
    finish_rows();
  }

 private:
  static constexpr int64_t kStep = tuning::kStepKeys;
  static_assert(kTileRowCount == kStripRows);
  // A score is the sum of one chain of additions for each 128 elements of the head, in their order:
  // one chain for all of a head of 512 has twice the rounding error. Levels that round products
  // before they add them have one for each 32.
  static constexpr int64_t kChain = (kHasFusedProducts ? 128 : 32) / Dot::kPerElement;

  static AttentionWorkspace split(const SlidingWindowAttentionParams& params, int64_t rows,
                                  void* memory) {
    AttentionWorkspace w = {};
    split_attention_workspace(memory, rows, params.head_size, params.value_size, &w);
    return w;
  }

  KeyRange range_of(int64_t row) const { return {w_.row_begin[row], w_.row_end[row]}; }

  // Packs the queries, empties the sums; the keys that some row sees.
  KeyRange start_rows() {
    Element* queries = reinterpret_cast<Element*>(w_.queries);
    const int64_t padded = (rows_ + kTileRowCount - 1) / kTileRowCount * kTileRowCount;
    KeyRange seen = {0, 0}, of_token = {0, 0};
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t token = this->token_of(row);
      if (row % p_.group() == 0) {
        of_token = p_.keys_seen(tile_.sequence, token);
        seen = hull(seen, of_token);
      }
      w_.row_begin[row] = of_token.begin;
      w_.row_end[row] = of_token.end;
      pack_query<Dot>(this->query_of(row), this->query_sign(), queries + row * query_stride_);
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
      this->fill_terms(first_row, kTileRowCount, first, seen, groups, w_.terms, kStep);
      groups = groups_with_visible_keys<kKeyGroup>(w_.terms, kStep, kTileRowCount, groups.begin,
                                                   groups.end);
      if (groups.begin == groups.end) return;
      seen = {max_of(seen.begin, groups.begin), min_of(seen.end, groups.end)};
    }
    multiply_keys(first_row, groups);
    Element* weights = reinterpret_cast<Element*>(weights_in());
    for (int r = 0; r < kTileRowCount; ++r) {
      const int64_t row = first_row + r;
      float* scores = w_.scores + r * kStep;
      if (has_rule_ && row < rows_) {
        const float* const terms = has_terms_ ? w_.terms + r * kStep : nullptr;
        this->apply_rule(row, first, groups, terms, scores);
      }
      if (part[r].begin > groups.begin || part[r].end < groups.end) {
        hide_outside(scores, groups.begin, groups.end, part[r]);
      }
      add_row(row, scores, groups, weights + r * (kStep / Dot::kPerElement));
    }
    multiply_values(first_row, seen, weights);
  }

  // Weights are in the place of the scores where they are floats.
  void* weights_in() const {
    return Dot::kPerElement == 1 ? static_cast<void*>(w_.scores) : static_cast<void*>(w_.weights);
  }

  void add_row(int64_t row, float* scores, KeyRange groups, Element* weights) {
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

  void finish_rows() {
    for (int64_t row = 0; row < rows_; ++row) {
      const double sum = softmax_.sum_of_row(row);
      this->finish_row(row, static_cast<double>(softmax_.max_of_row(row)), sum, sum,
                       w_.out + row * out_stride_);
    }
  }

  const AttentionWorkspace w_;
  OnlineSoftmax softmax_;
  const int64_t depth_, query_stride_, out_stride_, value_columns_;
};

// Tiles [begin, end), none with more than most_rows rows. `workspace` has
// attention_workspace_bytes() of these, aligned to 64.
void sliding_window_attention_tiles(const SlidingWindowAttentionParams& params,
                                    const AttentionTile* tiles, int64_t begin, int64_t end,
                                    int64_t most_rows, void* workspace);

}  // namespace lmdecode::LMD_SIMD::attention
