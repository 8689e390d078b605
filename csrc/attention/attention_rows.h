// Which rows, keys and positions a block of a CUDA kernel has: arithmetic for the device, tested on
// the host.
//
// Rows are queries times the query heads of a KV head, query by query: row r of KV head h is query
// r / group of head h * group + r % group. Lengths, offsets and positions in device memory are
// clamped to their range here: checking them would need a synchronisation.
#pragma once

#include "attention/sliding_window_attention.h"

namespace lmdecode::attention {

LMD_HOST_DEVICE int64_t clamped(int64_t value, int64_t least, int64_t most) {
  return min_of(max_of(value, least), most);
}

// A sequence of a call.
struct AttentionSequence {
  int64_t index;
  int64_t first_query, queries;
  int64_t first_key, keys;

  static LMD_HOST_DEVICE AttentionSequence of(const SlidingWindowAttentionParams& p,
                                              int64_t index) {
    AttentionSequence sequence = {index, 0, p.q_len, 0, p.kv_len};
    if (p.cu_seqlens_q != nullptr) {
      cut(p.cu_seqlens_q + index, p.ragged_queries, &sequence.first_query, &sequence.queries);
    }
    if (p.cu_seqlens_kv != nullptr) {
      cut(p.cu_seqlens_kv + index, p.ragged_keys, &sequence.first_key, &sequence.keys);
    } else if (p.kv_lengths != nullptr) {
      sequence.keys = clamped(p.kv_lengths[index], 0, p.kv_len);
    }
    return sequence;
  }

  // The position of query `token`.
  LMD_HOST_DEVICE int64_t position(const SlidingWindowAttentionParams& p, int64_t token) const {
    if (p.q_positions == nullptr) return aligned_position(token, queries, keys);
    return clamped(p.q_positions[index * p.position_strides.sequence +
                                 (first_query + token) * p.position_strides.token],
                   -kMaxPosition, kMaxPosition);
  }

  // The keys that query `token` can see, before masks.
  LMD_HOST_DEVICE KeyRange keys_seen(const SlidingWindowAttentionParams& p, int64_t token) const {
    if (p.mask_type != MaskType::kNone) return {0, keys};
    return visible_keys(position(p, token), p.window, p.window_right, keys);
  }

 private:
  static LMD_HOST_DEVICE void cut(const int64_t* ends, int64_t total, int64_t* first,
                                  int64_t* count) {
    *first = clamped(ends[0], 0, total);
    *count = clamped(ends[1], *first, total) - *first;
  }
};

// Rows of a KV head of a sequence that are worked on together.
struct AttentionRows {
  AttentionSequence sequence;
  int64_t kv_head;
  int64_t first_token;
  int first_head;  // of the group
  int group;
  int count;  // 0: none

  // Rows first_row to first_row + most_rows, as far as there are.
  static LMD_HOST_DEVICE AttentionRows of(const SlidingWindowAttentionParams& p,
                                          const AttentionSequence& sequence, int64_t kv_head,
                                          int64_t first_row, int most_rows) {
    const int64_t group = p.group(), rows = sequence.queries * group;
    AttentionRows tile = {sequence, kv_head, 0, 0, static_cast<int>(group), 0};
    if (first_row < 0 || first_row >= rows) return tile;
    tile.first_token = first_row / group;
    tile.first_head = static_cast<int>(first_row % group);
    tile.count = static_cast<int>(min_of(most_rows, rows - first_row));
    return tile;
  }

  LMD_HOST_DEVICE int64_t token(int row) const { return first_token + (first_head + row) / group; }
  LMD_HOST_DEVICE int64_t head(int row) const {
    return kv_head * group + (first_head + row) % group;
  }
};

// Kernels without a score rule compute scale * product, scale > 0. Anything else needs one.
LMD_HOST_DEVICE bool needs_score_rule(const SlidingWindowAttentionParams& p) {
  return p.softcap != 0.0f || p.alibi_slopes != nullptr || p.mask_type != MaskType::kNone ||
         p.key_padding != nullptr || !(p.scale > 0.0f);
}

// Rows to tiles of tile_rows. The tiles of ragged sequences follow one another. The first tile of a
// sequence is computed from its offset alone, which leaves unused tiles, so the device counts
// nothing.
struct AttentionTiles {
  int tile_rows;
  int64_t tiles;  // of a KV head, of one sequence or of all ragged ones
  int64_t count;  // of the call

  static LMD_HOST_DEVICE AttentionTiles of(const SlidingWindowAttentionParams& p, int tile_rows) {
    AttentionTiles tiling = {tile_rows, 0, 0};
    if (p.cu_seqlens_q != nullptr) {
      tiling.tiles = p.ragged_queries * p.group() / tile_rows + p.sequences;
      tiling.count = tiling.tiles * p.kv_heads;
    } else {
      tiling.tiles = (p.q_len * p.group() + tile_rows - 1) / tile_rows;
      tiling.count = tiling.tiles * p.kv_heads * p.sequences;
    }
    return tiling;
  }

  // The last tiles of a KV head see the most keys under a causal window, and come first.
  LMD_HOST_DEVICE AttentionRows tile(const SlidingWindowAttentionParams& p, int64_t index) const {
    int64_t at = tiles - 1 - index % tiles, head = index / tiles, sequence = 0;
    if (p.cu_seqlens_q != nullptr) {
      sequence = ragged_sequence(p, at);
      at -= first_tile(p, sequence);
    } else {
      sequence = head / p.kv_heads;
      head %= p.kv_heads;
    }
    return AttentionRows::of(p, AttentionSequence::of(p, sequence), head, at * tile_rows,
                             tile_rows);
  }

 private:
  // Rows before the sequence, by tiles, and one tile for what each sequence before it leaves over.
  LMD_HOST_DEVICE int64_t first_tile(const SlidingWindowAttentionParams& p,
                                     int64_t sequence) const {
    const int64_t token = clamped(p.cu_seqlens_q[sequence], 0, p.ragged_queries);
    return token * p.group() / tile_rows + sequence;
  }
  // The last sequence whose tiles begin at or before `at`.
  LMD_HOST_DEVICE int64_t ragged_sequence(const SlidingWindowAttentionParams& p, int64_t at) const {
    int64_t begin = 0, end = p.sequences;
    while (end - begin > 1) {
      const int64_t middle = begin + (end - begin) / 2;
      if (first_tile(p, middle) <= at) {
        begin = middle;
      } else {
        end = middle;
      }
    }
    return begin;
  }
};

// The keys that some row sees, and those that all rows see. Start with of_no_row() and add every
// row.
struct RowsKeys {
  KeyRange some;
  KeyRange all;

  static LMD_HOST_DEVICE RowsKeys of_no_row() { return {{kNone, 0}, {0, kNone}}; }
  LMD_HOST_DEVICE void add(KeyRange row) {
    if (row.begin < row.end) {
      some = {min_of(some.begin, row.begin), max_of(some.end, row.end)};
    }
    all = {max_of(all.begin, row.begin), min_of(all.end, row.end)};
  }
  // Every row sees every key of [begin, end).
  LMD_HOST_DEVICE bool all_see(int64_t begin, int64_t end) const {
    return begin >= all.begin && end <= all.end;
  }

  static constexpr int64_t kNone = int64_t{1} << 62;  // beyond every key
};

// Keys to parts of fixed places: the part-th that rows which see `some` have.
LMD_HOST_DEVICE KeyRange decode_part(KeyRange some, int64_t part, int64_t split_keys) {
  if (some.begin >= some.end) return {0, 0};
  const int64_t first = (some.begin / split_keys + part) * split_keys;
  const KeyRange keys = {max_of(some.begin, first), min_of(some.end, first + split_keys)};
  return keys.begin < keys.end ? keys : KeyRange{0, 0};
}

// How many parts rows of a sequence can have at most, by what the host knows.
LMD_HOST_DEVICE int64_t most_decode_parts(const SlidingWindowAttentionParams& p,
                                          int64_t split_keys) {
  int64_t parts = (p.kv_len + split_keys - 1) / split_keys;
  if (p.window != kUnlimited && p.window_right != kUnlimited && p.q_positions == nullptr) {
    // The first row's first key to the last row's last one, wherever that lies.
    const int64_t keys = p.window + p.window_right + p.q_len - 1;
    parts = min_of(parts, (keys + split_keys - 2) / split_keys + 1);
  }
  return max_of(parts, 1);
}

}  // namespace lmdecode::attention
