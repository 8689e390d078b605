// sliding_window_decode on the CPU, compiled once for each CPU capability. See simd/vec.h.
//
// A part is some keys of a sequence for one KV head. It goes through them in blocks of 64: scores
// of all rows (queries times the query heads of the KV head), softmax, product with the values.
#pragma once

#include "attention/decode_products.h"
#include "attention/online_softmax.h"
#include "attention/pack.h"
#include "attention/score_terms.h"
#include "attention/sliding_window_decode.h"

namespace lmdecode::LMD_SIMD {

// T: the dtype of the cache. Rows: FloatRows or PairRows of T, or FloatRows of floats to which each
// block is copied first.
template <class Rows, class T, bool kIsCopied>
class DecodeAttention {
 public:
  // `memory`: decode_workspace_bytes(), aligned to 64.
  DecodeAttention(const SlidingWindowAttentionParams& params, const DecodePartials& partials,
                  void* memory)
      : p_(params),
        partials_(partials),
        rows_(params.q_len * params.group()),
        head_size_(padded_to(params.head_size, Rows::kVectorSize)),
        value_size_(padded_to(params.value_size, Rows::kVectorSize)),
        has_rule_(params.softcap != 0.0f || params.alibi_slopes != nullptr ||
                  params.key_padding != nullptr) {
    split_decode_workspace(memory, rows_, params.head_size, params.value_size, &w_);
    query_stride_ = padded_decode_size(params.head_size);
  }

  void run(const DecodePart& part) {
    part_ = part;
    out_ = partials_.out + part.slot * partials_.rows * partials_.out_stride;
    float* row_max = partials_.row_max + part.slot * partials_.rows;
    const double scale = static_cast<double>(p_.scale);
    const double magnitude = scale < 0.0 ? -scale : scale;
    OnlineSoftmax softmax(
        row_max, w_.row_sum,
        static_cast<float>(has_rule_ || scale == 0.0 ? kLog2E : magnitude * kLog2E));
    const KeyRange seen = start_rows();
    softmax.reset(partials_.rows);
    for (int64_t first = seen.begin / kBlockKeys * kBlockKeys; first < seen.end;
         first += kBlockKeys) {
      const bool is_first = first <= seen.begin;
      list_block(p_.k, p_.k_strides, first, is_first, seen.begin, w_.key_rows);
      list_block(p_.v, p_.v_strides, first, is_first, seen.begin, w_.value_rows);
      run_block(first, part_of_range(seen, first, first + kBlockKeys), &softmax);
    }
    double* row_sum = partials_.row_sum + part.slot * partials_.rows;
    for (int64_t row = 0; row < partials_.rows; ++row) row_sum[row] = softmax.sum_of_row(row);
  }

 private:
  using Row = typename Rows::Row;
  using Query = typename Rows::Query;
  using Weight = typename Rows::Weight;

  static int64_t padded_to(int64_t size, int64_t multiple) {
    return (size + multiple - 1) / multiple * multiple;
  }

  int64_t head_of(int64_t row) const { return part_.kv_head * p_.group() + row % p_.group(); }

  // The queries as they are multiplied, and the keys of the part that some row sees.
  KeyRange start_rows() {
    const float sign = has_rule_ || p_.scale > 0.0f ? 1.0f : p_.scale < 0.0f ? -1.0f : 0.0f;
    Query* queries = reinterpret_cast<Query*>(w_.queries);
    KeyRange seen = {0, 0};
    sequence_keys_ = {0, 0};
    for (int64_t row = 0; row < partials_.rows; ++row) {
      KeyRange of_row = {0, 0};
      Query* query = queries + row * query_stride_;
      for (int64_t i = 0; i < query_stride_; ++i) query[i] = Query{};
      if (row < rows_) {
        const int64_t token = row / p_.group();
        const KeyRange visible = p_.keys_seen(part_.sequence, token);
        sequence_keys_ = hull(sequence_keys_, visible);
        of_row = {max_of(visible.begin, part_.keys.begin), min_of(visible.end, part_.keys.end)};
        if (of_row.begin >= of_row.end) of_row = {0, 0};
        const AttentionStrides& s = p_.q_strides;
        const T* from = static_cast<const T*>(p_.q) + part_.sequence * s.sequence +
                        head_of(row) * s.head + token * s.token;
        for (int64_t i = 0; i < p_.head_size; ++i) {
          store_one(query + i, to_float(from[i * s.element]) * sign);
        }
      }
      w_.row_begin[row] = of_row.begin;
      w_.row_end[row] = of_row.end;
      seen = hull(seen, of_row);
      for (int64_t i = 0; i < partials_.out_stride; ++i) out_[row * partials_.out_stride + i] = 0;
    }
    return seen;
  }

  // Lists where the rows of a block and of the next one begin. From the second block of a part on,
  // its own are those that were the next.
  void list_block(const void* data, const AttentionStrides& s, int64_t first, bool is_first,
                  int64_t begin, const void** memory) const {
    const T** rows = reinterpret_cast<const T**>(memory);
    if (!is_first) {
      for (int64_t i = 0; i < kBlockKeys; ++i) rows[i] = rows[kBlockKeys + i];
      begin = first + kBlockKeys;
    }
    // What nobody sees may lie nowhere.
    const int64_t end = min_of(first + 2 * kBlockKeys, sequence_keys_.end);
    list_rows(p_, data, s, part_.sequence, part_.kv_head, {begin, end}, rows + (begin - first));
    for (int64_t i = max_of(1, end - first); i < 2 * kBlockKeys; ++i) rows[i] = rows[i - 1];
  }

  // The keys or values of a listed block as the products read them.
  CacheTokens<Row> block_rows(const void** memory, const AttentionStrides& s, int64_t size,
                              KeyRange range, int64_t padded, float* copy,
                              const void** copied_rows) const {
    const T* const* rows = reinterpret_cast<const T**>(memory);
    if constexpr (kIsCopied) {
      const float** copied = reinterpret_cast<const float**>(copied_rows);
      const HeadRows<T> from = {rows, s.element, size};
      for (int64_t key = range.begin; key < range.end; ++key) {
        copied[key] = copy + key * padded;
        for (int64_t at = 0; at < padded; at += kLanes) {
          store(copy + key * padded + at, load_elements(from.row(key), at));
        }
      }
      return {copied, padded, 0};
    } else {
      const int64_t bytes = size * static_cast<int64_t>(sizeof(T));
      return {rows, size, min_of(kBlockKeys, max_of(1, kPrefetchBytes / bytes))};
    }
  }

  void run_block(int64_t first, KeyRange range, OnlineSoftmax* softmax) {
    const CacheTokens<Row> keys = block_rows(w_.key_rows, p_.k_strides, p_.head_size, range,
                                             head_size_, w_.keys, w_.copied_rows);
    const CacheTokens<Row> values = block_rows(w_.value_rows, p_.v_strides, p_.value_size, range,
                                               value_size_, w_.values, w_.copied_rows + kBlockKeys);
    const KeyRange groups = {range.begin / kKeyGroup * kKeyGroup,
                             (range.end + kKeyGroup - 1) / kKeyGroup * kKeyGroup};
    for (int64_t row = 0; row < rows_;) {
      row += with_rows(row, [&](auto count) {
        multiply_keys<decltype(count)::kValue>(row, keys, range, groups);
      });
    }
    if (p_.key_padding != nullptr) {
      row_terms(p_, part_.sequence, 0, 0, first, range, w_.terms);
    }
    for (int64_t row = 0; row < partials_.rows; ++row) {
      add_row(row, first, groups, softmax);
    }
    for (int64_t row = 0; row < rows_;) {
      row += with_rows(row, [&](auto count) {
        constexpr int kRows = decltype(count)::kValue;
        for (int64_t key = range.begin; key < range.end;) {
          const int64_t end = min_of(range.end, (key / kChunkKeys + 1) * kChunkKeys);
          add_all_values<Rows, kRows>(weights_of(row), values, {key, end}, value_size_,
                                      out_ + row * partials_.out_stride, partials_.out_stride);
          key = end;
        }
      });
    }
  }

  template <int kRows>
  struct RowCount {
    static constexpr int kValue = kRows;
  };

  // Calls body(RowCount) for the tile of rows that begins at `row`; how many rows it has.
  template <class Body>
  int64_t with_rows(int64_t row, const Body& body) const {
    const int64_t left = rows_ - row;
    if (left >= 3) {
      body(RowCount<4>());
      return 4;
    }
    if (left == 2) {
      body(RowCount<2>());
      return 2;
    }
    body(RowCount<1>());
    return 1;
  }

  template <int kRows>
  void multiply_keys(int64_t row, const CacheTokens<Row>& keys, KeyRange range, KeyRange groups) {
    constexpr int64_t kKeys = kLanes / kRows;
    const Query* queries = reinterpret_cast<Query*>(w_.queries) + row * query_stride_;
    float* scores = w_.scores + row * kBlockKeys;
    for (int64_t key = groups.begin; key < groups.end; key += kKeys) {
      if (key >= range.begin && key + kKeys <= range.end) {
        score_tile<Rows, kRows, false>(queries, query_stride_, keys, range, key, head_size_,
                                       scores);
      } else {
        score_tile<Rows, kRows, true>(queries, query_stride_, keys, range, key, head_size_, scores);
      }
    }
  }

  // Weights are in the place of the scores where they are floats.
  Weight* weights_of(int64_t row) const {
    void* base =
        Rows::kKeysOfAWeight == 1 ? static_cast<void*>(w_.scores) : static_cast<void*>(w_.weights);
    return static_cast<Weight*>(base) + row * kBlockKeys;
  }

  void add_row(int64_t row, int64_t first, KeyRange groups, OnlineSoftmax* softmax) {
    float* scores = w_.scores + row * kBlockKeys;
    if (has_rule_ && row < rows_) {
      ScoreRule rule = {p_.scale, p_.softcap, 0.0f, 0.0f,
                        p_.key_padding == nullptr ? nullptr : w_.terms};
      if (p_.alibi_slopes != nullptr) {
        rule.slope = p_.alibi_slopes[part_.sequence * p_.alibi_sequence_stride + head_of(row)];
        rule.distance = static_cast<float>(p_.position(part_.sequence, row / p_.group()) - first);
      }
      rule.apply(scores, groups.begin, groups.end);
    }
    const KeyRange seen =
        part_of_range({w_.row_begin[row], w_.row_end[row]}, first, first + kBlockKeys);
    if (seen.begin > groups.begin || seen.end < groups.end) {
      hide_outside(scores, groups.begin, groups.end, seen);
    }
    Weight* weights = weights_of(row);
    softmax->add(row, scores, groups.begin, groups.end, out_ + row * partials_.out_stride,
                 value_size_,
                 [&](int64_t key, F32 weight) { Rows::store_weights(weights + key, weight); });
  }

  const SlidingWindowAttentionParams& p_;
  const DecodePartials& partials_;
  const int64_t rows_, head_size_, value_size_;
  const bool has_rule_;
  DecodeWorkspace w_;
  int64_t query_stride_;
  DecodePart part_ = {};
  KeyRange sequence_keys_ = {};  // that some query of its sequence sees
  float* out_ = nullptr;
};

// Parts [begin, end) to their slots. `workspace` has decode_workspace_bytes(), aligned to 64.
void sliding_window_decode_parts(const SlidingWindowAttentionParams& params,
                                 const DecodePart* parts, const DecodePartials& partials,
                                 int64_t begin, int64_t end, void* workspace);

// Heads [begin, end): their slots to rows of the output. The slots are overwritten.
void sliding_window_decode_heads(const SlidingWindowAttentionParams& params,
                                 const DecodeHead* heads, const DecodePartials& partials,
                                 int64_t begin, int64_t end);

}  // namespace lmdecode::LMD_SIMD
