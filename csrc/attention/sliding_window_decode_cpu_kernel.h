// sliding_window_decode on the CPU, compiled once for each CPU capability. See simd/vec.h.
//
// A part is some keys of a sequence for one KV head. It goes through them in blocks: scores
// of all rows (queries times the query heads of the KV head), softmax, product with the values.
#pragma once

#include <type_traits>

#include "attention/decode_matrix_products.h"
#include "attention/decode_products.h"
#include "attention/online_softmax.h"
#include "attention/pack.h"
#include "attention/score_terms.h"
#include "attention/sliding_window_decode.h"

namespace lmdecode::LMD_SIMD::attention {

using namespace lmdecode::attention;

// How the kernel reads a block: keys at equal distances, keys anywhere, or a copy of it. The bits
// of a result do not tell which. kInt8: a copy of what Int8Cell stands for.
enum class CacheLayout { kStrided, kListed, kCopied, kInt8 };

// T: the dtype of the cache, or of copies of it. Rows: FloatRows or PairRows of T.
template <class Rows, class T, CacheLayout kLayout>
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
    // Padding rows of the last tile have weight 0.
    for (int64_t i = rows_ * 16; i < partials.rows * 16; ++i) w_.weights[i] = 0;
  }

  // next_part: the next part to run, or null.
  void run(const DecodePart& part, const DecodePart* next_part) {
    part_ = part;
    out_ = partials_.out + part.slot * partials_.rows * partials_.out_stride;
    float* row_max = partials_.row_max + part.slot * partials_.rows;
    const double scale = static_cast<double>(p_.scale);
    const double magnitude = scale < 0.0 ? -scale : scale;
    OnlineSoftmax softmax(
        row_max, w_.row_sum,
        static_cast<float>(has_rule_ || scale == 0.0 ? kLog2E : magnitude * kLog2E));
    const KeyRange seen = start_rows();
    softmax.reset(rows_);
    for (int64_t first = seen.begin / kBlockKeys * kBlockKeys; first < seen.end;
         first += kBlockKeys) {
      const KeyRange range = part_of_range(seen, first, first + kBlockKeys);
      find_block(first, range, first <= seen.begin, next_part);
      run_block(first, range, &softmax);
    }
    double* row_sum = partials_.row_sum + part.slot * partials_.rows;
    for (int64_t row = 0; row < rows_; ++row) row_sum[row] = softmax.sum_of_row(row);
  }

 private:
  using Row = typename Rows::Row;
  static constexpr int64_t kBlockKeys = Rows::kBlockKeys, kVectorSize = Rows::kVectorSize;
  static constexpr bool kMultipliesTiles = Rows::kMultipliesTiles;
  static constexpr int64_t kTileRows = kMultipliesTiles ? 16 : 8;
  using Query = typename Rows::Query;
  using Weight = typename Rows::Weight;
  using Cell = std::conditional_t<kLayout == CacheLayout::kInt8, Int8Cell, T>;
  using Tokens =
      std::conditional_t<kLayout == CacheLayout::kListed, ListedTokens<Row>, StridedTokens<Row>>;

  static int64_t padded_to(int64_t size, int64_t multiple) {
    return (size + multiple - 1) / multiple * multiple;
  }

  int64_t head_of(int64_t row) const { return part_.kv_head * p_.group() + row % p_.group(); }

  // The queries as they are multiplied, and the keys of the part that some row sees.
  KeyRange start_rows() {
    const float sign = has_rule_ || p_.scale > 0.0f ? 1.0f : p_.scale < 0.0f ? -1.0f : 0.0f;
    const int64_t query_rows = kMultipliesTiles ? padded_to(rows_, kTileRows) : partials_.rows;
    Query* queries = reinterpret_cast<Query*>(w_.queries);
    for (int64_t i = 0; i < query_rows * query_stride_; ++i) queries[i] = Query{};
    const int64_t out_rows = kMultipliesTiles ? partials_.rows : rows_;
    for (int64_t i = 0; i < out_rows * partials_.out_stride; ++i) out_[i] = 0;
    KeyRange seen = {0, 0};
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t token = row / p_.group();
      const KeyRange visible = p_.keys_seen(part_.sequence, token);
      KeyRange of_row = {max_of(visible.begin, part_.keys.begin),
                         min_of(visible.end, part_.keys.end)};
      if (of_row.begin >= of_row.end) of_row = {0, 0};
      const AttentionStrides& s = p_.q_strides;
      const T* from = static_cast<const T*>(p_.q) + part_.sequence * s.sequence +
                      head_of(row) * s.head + token * s.token;
      // Layout of a tile: [vectors or pairs, rows].
      const int64_t tile = row / kTileRows * kTileRows;
      const int64_t together = kMultipliesTiles ? 2 : kVectorSize;
      const int64_t step = (kMultipliesTiles ? kTileRows : tile_rows(tile)) * together;
      Query* query = queries + tile * query_stride_ + (row - tile) * together;
      for (int64_t i = 0; i < p_.head_size; ++i) {
        store_one(query + i / together * step + i % together, to_float(from[i * s.element]) * sign);
      }
      w_.row_begin[row] = of_row.begin;
      w_.row_end[row] = of_row.end;
      seen = hull(seen, of_row);
    }
    return seen;
  }

  static const Cell** as_rows(const void** memory) {
    return reinterpret_cast<const Cell**>(memory);
  }

  // The place in `data` of token 0 of a block at equal distances, by way of one of its keys.
  const T* first_row(const void* data, const AttentionStrides& s, const DecodePart& part,
                     int64_t first, int64_t key) const {
    return static_cast<const T*>(data) + p_.key_offset(s, part.sequence, part.kv_head, key) -
           (key - first) * s.token;
  }

  // Sets up the block from `first` on; the keys of `range` are read. Reading keys prefetches the
  // values of the block, and reading values the next keys: faster, as measured, than prefetching
  // further ahead in the same stream.
  void find_block(int64_t first, KeyRange range, bool is_first, const DecodePart* next_part) {
    const int64_t key = first + range.begin;
    const DecodePart* next = &part_;
    int64_t next_key = first + kBlockKeys;
    if (next_key >= part_.keys.end) {
      next =
          next_part != nullptr && next_part->keys.begin < next_part->keys.end ? next_part : &part_;
      next_key = next == &part_ ? key : next->keys.begin;
    }
    const int64_t next_first = next_key / kBlockKeys * kBlockKeys;
    if constexpr (kLayout == CacheLayout::kStrided) {
      const int64_t k_stride = p_.k_strides.token, v_stride = p_.v_strides.token;
      const T* values = first_row(p_.v, p_.v_strides, part_, first, key);
      keys_ = {first_row(p_.k, p_.k_strides, part_, first, key), k_stride, values, v_stride};
      values_ = {values, v_stride, first_row(p_.k, p_.k_strides, *next, next_first, next_key),
                 k_stride};
    } else if constexpr (kLayout == CacheLayout::kListed) {
      const Cell **keys = as_rows(w_.key_rows), **values = as_rows(w_.value_rows);
      if (is_first) {
        list_block(p_.k, p_.k_strides, part_, first, range, keys);
      } else {  // the next ones of the block before
        for (int64_t i = 0; i < kBlockKeys; ++i) keys[i] = keys[kBlockKeys + i];
      }
      list_block(p_.v, p_.v_strides, part_, first, range, values);
      list_block(p_.k, p_.k_strides, *next, next_first,
                 part_of_range(next->keys, next_first, next_first + kBlockKeys), keys + kBlockKeys);
      keys_ = {keys, values};
      values_ = {values, keys + kBlockKeys};
    } else {
      keys_ = copy_block(p_.k, p_.k_strides, p_.head_size, first, range, head_size_, w_.keys);
      values_ = copy_block(p_.v, p_.v_strides, p_.value_size, first, range, value_size_, w_.values);
    }
  }

  // rows[key] for the keys of a range; keys before and after it, which are only prefetched, get the
  // nearest of these.
  void list_block(const void* data, const AttentionStrides& s, const DecodePart& part,
                  int64_t first, KeyRange range, const Cell** rows) const {
    list_rows(p_, data, s, part.sequence, part.kv_head, {first + range.begin, first + range.end},
              rows + range.begin);
    for (int64_t i = 0; i < range.begin; ++i) rows[i] = rows[range.begin];
    for (int64_t i = range.end; i < kBlockKeys; ++i) rows[i] = rows[range.end - 1];
  }

  // The keys of a range side by side, with zeros to whole vectors.
  StridedTokens<T> copy_block(const void* data, const AttentionStrides& s, int64_t size,
                              int64_t first, KeyRange range, int64_t padded, float* memory) const {
    const Cell** rows = as_rows(w_.key_rows);
    list_block(data, s, part_, first, range, rows);
    T* copy = reinterpret_cast<T*>(memory);
    for (int64_t key = range.begin; key < range.end; ++key) {
      const Cell* from = rows[key];
      T* to = copy + key * padded;
      if constexpr (kLayout == CacheLayout::kInt8) {
        const HeadRow<Cell> row = {from, 1, size};
        for (int64_t i = 0; i < padded; i += kLanes) store(to + i, load_elements(row, i));
        continue;
      } else if (s.element == 1) {
        __builtin_memcpy(to, from, static_cast<size_t>(size) * sizeof(T));
      } else {
        for (int64_t i = 0; i < size; ++i) to[i] = from[i * s.element];
      }
      for (int64_t i = size; i < padded; ++i) to[i] = T{};
    }
    return {copy, padded, copy, padded};
  }

  void run_block(int64_t first, KeyRange range, OnlineSoftmax* softmax) {
    const KeyRange groups = {range.begin / kKeyGroup * kKeyGroup,
                             (range.end + kKeyGroup - 1) / kKeyGroup * kKeyGroup};
    if constexpr (kMultipliesTiles) {
      multiply_key_tiles(range, groups);
    } else {
      for_tiles([&]<int kRows, Ahead kAhead>(int64_t row) {
        multiply_keys<kRows, kAhead>(row, range, groups);
      });
    }
    if (p_.key_padding != nullptr) {
      row_terms(p_, part_.sequence, 0, 0, first, range, w_.terms);
    }
    for (int64_t row = 0; row < rows_; ++row) add_row(row, first, groups, softmax);
    if constexpr (kMultipliesTiles) {
      multiply_value_tiles(range);
    } else {
      for_tiles([&]<int kRows, Ahead kAhead>(int64_t row) {
        for (int64_t key = range.begin; key < range.end;) {
          const int64_t end = min_of(range.end, (key / kChunkKeys + 1) * kChunkKeys);
          add_all_values<Rows, kRows, kAhead>(weights_of(row), values_, {key, end}, value_size_,
                                              out_ + row * partials_.out_stride,
                                              partials_.out_stride);
          key = end;
        }
      });
    }
  }

  // Calls body<rows, prefetch>(row) for tiles of 8, 4, 2 and 1 rows, padding rows included. Only
  // the first tile reads from memory.
  template <class Body>
  void for_tiles(const Body& body) const {
    if constexpr (kIsPlain) {
      tile<Ahead::kNothing>(0, body);
#if defined(LMD_SIMD_AVX512)
    } else if (partials_.in_order) {
      tile<Ahead::kToFirstCache>(0, body);
#endif
    } else {
      tile<Ahead::kToSecondCache>(0, body);
    }
    for (int64_t row = tile_rows(0); row < rows_; row += tile_rows(row)) {
      tile<Ahead::kNothing>(row, body);
    }
  }
  int64_t tile_rows(int64_t row) const {
    const int64_t left = rows_ - row;
    return left >= 5 ? kTileRows : left >= 3 ? 4 : left;
  }
  template <Ahead kAhead, class Body>
  void tile(int64_t row, const Body& body) const {
    switch (tile_rows(row)) {
      case 8:
        return body.template operator()<kTileRows, kAhead>(row);
      case 4:
        return body.template operator()<4, kAhead>(row);
      case 2:
        return body.template operator()<2, kAhead>(row);
      default:
        return body.template operator()<1, kAhead>(row);
    }
  }

  template <int kRows, Ahead kAhead>
  void multiply_keys(int64_t row, KeyRange range, KeyRange groups) {
    constexpr int64_t kKeys = kLanes / kRows;
    const Query* queries = reinterpret_cast<Query*>(w_.queries) + row * query_stride_;
    float* scores = w_.scores + row * kBlockKeys;
    for (int64_t key = groups.begin; key < groups.end; key += kKeys) {
      if (!kIsPlain && key >= range.begin && key + kKeys <= range.end) {
        score_tile<Rows, kRows, kIsPlain, kAhead>(queries, keys_, range, key, head_size_, scores);
      } else {
        score_tile<Rows, kRows, true, kAhead>(queries, keys_, range, key, head_size_, scores);
      }
    }
  }

  void multiply_key_tiles(KeyRange range, KeyRange groups) {
#if defined(LMD_SIMD_AVX512_AMX)
    const Query* queries = reinterpret_cast<Query*>(w_.queries);
    for (int64_t key = groups.begin; key < groups.end; key += kKeyGroup) {
      const KeyRange in_group = {max_of(key, range.begin), min_of(key + kKeyGroup, range.end)};
      const StridedTokens<T> keys = key_tile(key, in_group);
      for (int64_t row = 0; row < rows_; row += kTileRows) {
        score_key_tile(keys.data, keys.stride, queries + row * query_stride_, head_size_,
                       min_of(rows_ - row, kTileRows), w_.scores + row * kBlockKeys + key);
      }
      for (int64_t i = in_group.begin; i < in_group.end; ++i) {
        prefetch_row<Ahead::kToSecondCache>(keys_.row_ahead(i), head_size_);
      }
    }
#endif
  }

  // 16 keys from `key` on: in place, or a copy with zeros for keys that are not read.
  StridedTokens<T> key_tile(int64_t key, KeyRange in_group) const {
    if constexpr (kLayout != CacheLayout::kListed) {
      if (in_group.end - in_group.begin == kKeyGroup) {
        return {keys_.row(key), keys_.stride, nullptr, 0};
      }
    }
    // After the rows that copy_block() has written.
    T* copy = reinterpret_cast<T*>(w_.keys) + kBlockKeys * head_size_;
    for (int64_t i = 0; i < kKeyGroup; ++i) {
      const size_t bytes = static_cast<size_t>(head_size_) * sizeof(T);
      T* to = copy + i * head_size_;
      if (key + i >= in_group.begin && key + i < in_group.end) {
        __builtin_memcpy(to, keys_.row(key + i), bytes);
      } else {
        __builtin_memset(static_cast<void*>(to), 0, bytes);
      }
    }
    return {copy, head_size_, nullptr, 0};
  }

  void multiply_value_tiles(KeyRange range) {
#if defined(LMD_SIMD_AVX512_AMX)
    uint32_t* pairs =
        reinterpret_cast<uint32_t*>(reinterpret_cast<T*>(w_.values) + kBlockKeys * value_size_);
    pair_values(values_, range, value_size_, pairs);
    for (int64_t row = 0; row < rows_; row += kTileRows) {
      add_value_tiles(weights_of(row), pairs, value_size_, out_ + row * partials_.out_stride,
                      partials_.out_stride);
    }
#endif
  }

  // Weights are in the place of the scores where they are floats.
  Weight* weights_of(int64_t row) const {
    void* base =
        Rows::kKeysOfAWeight == 1 ? static_cast<void*>(w_.scores) : static_cast<void*>(w_.weights);
    return static_cast<Weight*>(base) + row * kBlockKeys;
  }

  void add_row(int64_t row, int64_t first, KeyRange groups, OnlineSoftmax* softmax) {
    float* scores = w_.scores + row * kBlockKeys;
    if (has_rule_) apply_rule(row, first, groups, scores);
    const KeyRange seen =
        part_of_range({w_.row_begin[row], w_.row_end[row]}, first, first + kBlockKeys);
    if (seen.begin > groups.begin || seen.end < groups.end) {
      hide_outside(scores, groups.begin, groups.end, seen);
    }
    Weight* weights = weights_of(row);
    softmax->add(row, scores, groups.begin, groups.end, out_ + row * partials_.out_stride,
                 value_size_,
                 [&](int64_t key, F32 weight) { Rows::store_weights(weights + key, weight); });
    if constexpr (kMultipliesTiles) {  // keys of the block that no row sees
      for (int64_t key = 0; key < groups.begin; ++key) weights[key] = Weight{};
      for (int64_t key = groups.end; key < kBlockKeys; ++key) weights[key] = Weight{};
    }
  }

  [[gnu::noinline]] void apply_rule(int64_t row, int64_t first, KeyRange groups, float* scores) {
    ScoreRule rule = {p_.scale, p_.softcap, 0.0f, 0.0f,
                      p_.key_padding == nullptr ? nullptr : w_.terms};
    if (p_.alibi_slopes != nullptr) {
      rule.slope = p_.alibi_slopes[part_.sequence * p_.alibi_sequence_stride + head_of(row)];
      rule.distance = static_cast<float>(p_.position(part_.sequence, row / p_.group()) - first);
    }
    rule.apply(scores, groups.begin, groups.end);
  }

  const SlidingWindowAttentionParams& p_;
  const DecodePartials& partials_;
  const int64_t rows_, head_size_, value_size_;
  const bool has_rule_;
  DecodeWorkspace w_;
  int64_t query_stride_;
  DecodePart part_ = {};
  Tokens keys_ = {}, values_ = {};  // of a block
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

}  // namespace lmdecode::LMD_SIMD::attention
