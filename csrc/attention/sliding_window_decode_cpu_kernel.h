// sliding_window_decode on the CPU, compiled once for each CPU capability. See simd/vec.h.
//
// A part is some keys of a sequence for one KV head: scores of all rows (queries times the query
// heads of the KV head), one softmax, products with the values. So its keys are read in one run,
// and then its values, each block by block.
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
    constexpr int64_t kRowWeights = kScoreStride / 2;
    for (int64_t i = rows_ * kRowWeights; i < partials.rows * kRowWeights; ++i) w_.weights[i] = 0;
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
    first_ = part.keys.begin / kScoreStride * kScoreStride;
    next_part_ =
        next_part != nullptr && next_part->keys.begin < next_part->keys.end ? next_part : &part_;
    seen_ = part_of_range(seen, first_, first_ + kScoreStride);
    if (seen_.begin < seen_.end) {
      listed_ = {};
      for_blocks(false, [&](KeyRange range) { multiply_block_keys(range); });
      const KeyRange groups = groups_of(seen_);
      if (p_.key_padding != nullptr) row_terms(p_, part_.sequence, 0, 0, first_, seen_, w_.terms);
      for (int64_t row = 0; row < rows_; ++row) add_row(row, groups, &softmax);
      for_blocks(true, [&](KeyRange range) { multiply_block_values(range); });
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
  // Copies are read from where they have just been written.
  static constexpr bool kIsInPlace =
      kLayout == CacheLayout::kStrided || kLayout == CacheLayout::kListed;
  static constexpr Ahead kAheadOfTiles = kIsInPlace ? Ahead::kToSecondCache : Ahead::kNothing;

  // Keys or values of a part, from `first` on: a block.
  struct Block {
    const DecodePart* part;
    bool is_values;
    int64_t first;

    bool operator==(const Block&) const = default;
  };

  // All keys, or all values.
  struct Cache {
    const void* data;
    const AttentionStrides& strides;
    int64_t size;  // elements of a row
  };

  Cache cache_of(Block block) const {
    return block.is_values ? Cache{p_.v, p_.v_strides, p_.value_size}
                           : Cache{p_.k, p_.k_strides, p_.head_size};
  }

  static KeyRange groups_of(KeyRange range) {
    return {range.begin / kKeyGroup * kKeyGroup,
            (range.end + kKeyGroup - 1) / kKeyGroup * kKeyGroup};
  }

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

  // Calls body(keys), counted from block_, for the blocks of the keys that are seen; sets up their
  // tokens, and the lines to ask for meanwhile.
  template <class Body>
  void for_blocks(bool is_values, const Body& body) {
    for (block_ = seen_.begin / kBlockKeys * kBlockKeys; block_ < seen_.end; block_ += kBlockKeys) {
      const KeyRange range = part_of_range(seen_, block_, block_ + kBlockKeys);
      find_block({&part_, is_values, first_ + block_}, range);
      body(range);
    }
  }

  KeyRange keys_of(const DecodePart* part) const {
    return part == &part_ ? KeyRange{first_ + seen_.begin, first_ + seen_.end} : part->keys;
  }

  // The block that is read kBytesAhead after another one: of the keys, then of the values, then of
  // the next part's keys.
  Block later(Block block) const {
    const int64_t bytes = kBlockKeys * cache_of(block).size * static_cast<int64_t>(sizeof(Cell));
    const int64_t blocks = kLayout == CacheLayout::kListed ? 1 : max_of(1, kBytesAhead / bytes);
    block.first += blocks * kBlockKeys;
    const int64_t over = block.first - keys_of(&part_).end;
    if (over < 0) return block;
    Block next = {block.is_values ? next_part_ : &part_, !block.is_values, 0};
    const KeyRange keys = keys_of(next.part);
    next.first = min_of(keys.begin / kBlockKeys + over / kBlockKeys, (keys.end - 1) / kBlockKeys) *
                 kBlockKeys;
    return next;
  }

  // The keys of `range`, counted from the block's first, are read.
  void find_block(Block block, KeyRange range) {
    if constexpr (kIsInPlace) {
      const Block next = later(block);
      const KeyRange in_next =
          part_of_range(keys_of(next.part), next.first, next.first + kBlockKeys);
      if constexpr (kLayout == CacheLayout::kStrided) {
        tokens_ = strided_block(block, range);
        lines_.start(strided_block(next, in_next), in_next, cache_of(next).size);
      } else {
        const Cell **rows = as_rows(w_.token_rows), **rows_ahead = rows + kBlockKeys;
        if (listed_ == block) {
          for (int64_t i = 0; i < kBlockKeys; ++i) rows[i] = rows_ahead[i];
        } else {
          list_block(block, range, rows);
        }
        list_block(next, in_next, rows_ahead);
        listed_ = next;
        tokens_ = {rows};
        lines_.start({rows_ahead}, in_next, cache_of(next).size);
      }
    } else {
      tokens_ = copy_block(block, range, block.is_values ? value_size_ : head_size_,
                           block.is_values ? w_.values : w_.keys);
    }
  }

  // Of a block at equal distances, by way of one of its keys.
  StridedTokens<Row> strided_block(Block block, KeyRange range) const {
    const Cache cache = cache_of(block);
    const int64_t offset = p_.key_offset(cache.strides, block.part->sequence, block.part->kv_head,
                                         block.first + range.begin);
    const int64_t stride = cache.strides.token;
    return {static_cast<const T*>(cache.data) + offset - range.begin * stride, stride};
  }

  // rows[key] for the keys of a range; keys before and after it, which are only prefetched, get the
  // nearest of these.
  void list_block(Block block, KeyRange range, const Cell** rows) const {
    const Cache cache = cache_of(block);
    list_rows(p_, cache.data, cache.strides, block.part->sequence, block.part->kv_head,
              {block.first + range.begin, block.first + range.end}, rows + range.begin);
    for (int64_t i = 0; i < range.begin; ++i) rows[i] = rows[range.begin];
    for (int64_t i = range.end; i < kBlockKeys; ++i) rows[i] = rows[range.end - 1];
  }

  // The keys of a range side by side, with zeros to whole vectors.
  StridedTokens<T> copy_block(Block block, KeyRange range, int64_t padded, float* memory) const {
    const Cell** rows = as_rows(w_.token_rows);
    list_block(block, range, rows);
    const Cache cache = cache_of(block);
    const int64_t size = cache.size, element = cache.strides.element;
    T* copy = reinterpret_cast<T*>(memory);
    for (int64_t key = range.begin; key < range.end; ++key) {
      const Cell* from = rows[key];
      T* to = copy + key * padded;
      if constexpr (kLayout == CacheLayout::kInt8) {
        const HeadRow<Cell> row = {from, 1, size};
        for (int64_t i = 0; i < padded; i += kLanes) store(to + i, load_elements(row, i));
        continue;
      } else if (element == 1) {
        __builtin_memcpy(to, from, static_cast<size_t>(size) * sizeof(T));
      } else {
        for (int64_t i = 0; i < size; ++i) to[i] = from[i * element];
      }
      for (int64_t i = size; i < padded; ++i) to[i] = T{};
    }
    return {copy, padded};
  }

  // Keys of the block, counted from block_.
  void multiply_block_keys(KeyRange range) {
    const KeyRange groups = groups_of(range);
    if constexpr (kMultipliesTiles) {
      multiply_key_tiles(range, groups);
    } else {
      for_tiles([&]<int kRows, Ahead kAhead>(int64_t row) {
        multiply_keys<kRows, kAhead>(row, range, groups);
      });
    }
  }

  void multiply_block_values(KeyRange range) {
    if constexpr (kMultipliesTiles) {
      multiply_value_tiles(range);
    } else {
      for_tiles([&]<int kRows, Ahead kAhead>(int64_t row) {
        auto lines = lines_;  // in registers
        for (int64_t key = range.begin; key < range.end;) {
          const int64_t end = min_of(range.end, (key / kChunkKeys + 1) * kChunkKeys);
          add_all_values<Rows, kRows, kAhead>(weights_of(row) + block_, tokens_, {key, end},
                                              value_size_, out_ + row * partials_.out_stride,
                                              partials_.out_stride, &lines);
          key = end;
        }
      });
    }
  }

  // Calls body<rows, prefetch>(row) for tiles of 8, 4, 2 and 1 rows, padding rows included. Only
  // the first tile reads from memory.
  template <class Body>
  void for_tiles(const Body& body) const {
    if constexpr (kIsPlain || !kIsInPlace) {
      tile<Ahead::kNothing>(0, body);
#if defined(LMD_SIMD_AVX512)
    } else if (partials_.to_first_cache) {
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
    float* scores = w_.scores + row * kScoreStride + block_;
    auto lines = lines_;  // in registers
    for (int64_t key = groups.begin; key < groups.end; key += kKeys) {
      if (!kIsPlain && key >= range.begin && key + kKeys <= range.end) {
        score_tile<Rows, kRows, kIsPlain, kAhead>(queries, tokens_, range, key, head_size_, scores,
                                                  &lines);
      } else {
        score_tile<Rows, kRows, true, kAhead>(queries, tokens_, range, key, head_size_, scores,
                                              &lines);
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
                       min_of(rows_ - row, kTileRows),
                       w_.scores + row * kScoreStride + block_ + key);
      }
      for (int64_t i = 0; i < kKeyGroup * head_size_; i += kVectorSize) {
        lines_.template keep_pace<kAheadOfTiles, kLineBytes>(i);
      }
    }
#endif
  }

  // 16 keys from `key` on: in place, or a copy with zeros for keys that are not read.
  StridedTokens<T> key_tile(int64_t key, KeyRange in_group) const {
    if constexpr (kLayout != CacheLayout::kListed) {
      if (in_group.end - in_group.begin == kKeyGroup) {
        return {tokens_.row(key), tokens_.stride};
      }
    }
    // After the rows that copy_block() has written.
    T* copy = reinterpret_cast<T*>(w_.keys) + kBlockKeys * head_size_;
    for (int64_t i = 0; i < kKeyGroup; ++i) {
      const size_t bytes = static_cast<size_t>(head_size_) * sizeof(T);
      T* to = copy + i * head_size_;
      if (key + i >= in_group.begin && key + i < in_group.end) {
        __builtin_memcpy(to, tokens_.row(key + i), bytes);
      } else {
        __builtin_memset(static_cast<void*>(to), 0, bytes);
      }
    }
    return {copy, head_size_};
  }

  void multiply_value_tiles(KeyRange range) {
#if defined(LMD_SIMD_AVX512_AMX)
    uint32_t* pairs =
        reinterpret_cast<uint32_t*>(reinterpret_cast<T*>(w_.values) + kBlockKeys * value_size_);
    pair_values<kAheadOfTiles>(tokens_, range, value_size_, pairs, &lines_);
    for (int64_t row = 0; row < rows_; row += kTileRows) {
      add_value_tiles(weights_of(row) + block_, pairs, value_size_,
                      out_ + row * partials_.out_stride, partials_.out_stride);
    }
#endif
  }

  // Weights are in the place of the scores where they are floats.
  Weight* weights_of(int64_t row) const {
    void* base =
        Rows::kKeysOfAWeight == 1 ? static_cast<void*>(w_.scores) : static_cast<void*>(w_.weights);
    return static_cast<Weight*>(base) + row * kScoreStride;
  }

  void add_row(int64_t row, KeyRange groups, OnlineSoftmax* softmax) {
    float* scores = w_.scores + row * kScoreStride;
    if (has_rule_) apply_rule(row, groups, scores);
    const KeyRange seen =
        part_of_range({w_.row_begin[row], w_.row_end[row]}, first_, first_ + kScoreStride);
    if (seen.begin > groups.begin || seen.end < groups.end) {
      hide_outside(scores, groups.begin, groups.end, seen);
    }
    Weight* weights = weights_of(row);
    softmax->add(row, scores, groups.begin, groups.end, out_ + row * partials_.out_stride,
                 value_size_,
                 [&](int64_t key, F32 weight) { Rows::store_weights(weights + key, weight); });
    if constexpr (kMultipliesTiles) {  // keys of the blocks that no row sees
      const int64_t begin = groups.begin / kBlockKeys * kBlockKeys;
      for (int64_t key = begin; key < groups.begin; ++key) weights[key] = Weight{};
      for (int64_t key = groups.end; key % kBlockKeys != 0; ++key) weights[key] = Weight{};
    }
  }

  [[gnu::noinline]] void apply_rule(int64_t row, KeyRange groups, float* scores) {
    const float* const terms = p_.key_padding == nullptr ? nullptr : w_.terms;
    ScoreRule::of(p_, part_.sequence, head_of(row), row / p_.group(), first_, terms)
        .apply(scores, groups.begin, groups.end);
  }

  const SlidingWindowAttentionParams& p_;
  const DecodePartials& partials_;
  const int64_t rows_, head_size_, value_size_;
  const bool has_rule_;
  DecodeWorkspace w_;
  int64_t query_stride_;
  DecodePart part_ = {};
  const DecodePart* next_part_ = nullptr;
  int64_t first_ = 0;  // where the part's keys are counted from
  KeyRange seen_ = {};
  int64_t block_ = 0;   // the first key of the block that is read, counted from first_
  Tokens tokens_ = {};  // of it
  Block listed_ = {};   // whose rows are listed already
  LinesAhead<Tokens, Row> lines_ = {};
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
