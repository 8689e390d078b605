// sliding_window_attention: softmax(q k^T) v where each query sees a window of keys.
// docs/reference/attention.md is the user's page.
//
// A row (one query of one head) sees the keys of visible_keys() in key_range.h, less those that
// key_padding hides; with an attn_mask, all of its sequence less those that the mask hides. Scores
// are scale * q . k, then softcap * tanh(score / softcap), then minus slope * |position - key|,
// then plus the mask's value. A sink is the score of a key without a value.
//
// A row's result is bitwise a function of its own query, the keys and values of its sequence and
// the parameters. It does not depend on other rows of the call, the number of threads or the tiles.
// It does depend on the CPU capability: the same sums are taken with or without FMA, and bfloat16
// is multiplied natively if the processor supports it.
#pragma once

#include <cstdint>

#include "attention/key_range.h"
#include "common/half.h"
#include "common/host_device.h"
#include "simd/kernel_levels.h"

// ---- where a cache holds the keys and values of a sequence: in a row of its own, in blocks of a
// shared pool, or each in the row that a beam index names. Shared by the CPU and the CUDA kernels.
// docs/reference/kv_cache.md has the layouts of both tables.

namespace lmdecode::attention {

// A key: row (or block) of the cache, and the token within.
struct KeyPlace {
  int64_t row;
  int64_t token;
};

// At most one of the tables is given. Only entries of keys that some query of the sequence sees are
// read. They name a row below `rows`, which is checked on the CPU alone.
struct KeyPlaces {
  const int32_t* block_table = nullptr;  // [sequences, blocks of a sequence], or null
  const int32_t* indirection = nullptr;  // [sequences, keys], or null
  int64_t sequence_stride = 0;           // of either
  int64_t block_size = 0;                // keys of a block
  int64_t rows = 0;                      // that k and v have: blocks of a pool, rows of a cache

  LMD_HOST_DEVICE bool has_table() const {
    return block_table != nullptr || indirection != nullptr;
  }

  // The place of key `key` of a sequence. Without a table, row `sequence` of the cache.
  LMD_HOST_DEVICE KeyPlace place(int64_t sequence, int64_t key) const {
    if (block_table != nullptr) {
      return {block_table[sequence * sequence_stride + key / block_size], key % block_size};
    }
    if (indirection != nullptr) return {indirection[sequence * sequence_stride + key], key};
    return {sequence, key};
  }
};

// Values of an additive mask of this or less hide the key.
constexpr float kMaskedScore = -65536.0f;

enum class MaskType : int32_t { kNone, kBool, kFloat32, kFloat16, kBFloat16 };

// A row of int8 keys or values: a float, the scale, then one int8 for each element of the head;
// element i is scale times the i-th. Strides are then in bytes.
struct Int8Cell {
  int8_t byte;
};
constexpr int64_t kInt8ScaleBytes = 4;

// In elements.
struct AttentionStrides {
  int64_t sequence = 0;
  int64_t head = 0;
  int64_t token = 0;
  int64_t element = 0;
};

struct SlidingWindowAttentionParams {
  DType dtype = DType::kFloat32;
  int64_t sequences = 0;
  int64_t q_heads = 0;
  int64_t kv_heads = 0;        // divides q_heads
  int64_t head_size = 0;       // of queries and keys
  int64_t value_size = 0;      // of values and the output
  int64_t q_len = 0;           // of each sequence, where cu_seqlens_q is null
  int64_t kv_len = 0;          // of each sequence, where kv_lengths and cu_seqlens_kv are null
  int64_t ragged_queries = 0;  // of all sequences, where cu_seqlens_q is given
  int64_t ragged_keys = 0;     // of all sequences, where cu_seqlens_kv is given

  const void* q = nullptr;  // [sequences, q_heads, q_len, head_size] by its strides
  const void* k = nullptr;  // [sequences, kv_heads, kv_len, head_size]
  const void* v = nullptr;  // [sequences, kv_heads, kv_len, value_size]
  AttentionStrides q_strides, k_strides, v_strides;  // ragged: sequence is 0
  // k and v are rows of Int8Cell, only on the CPU; dtype, of q and out, is float32.
  bool has_int8_keys = false;
  // q, k and v of float32 without int8 may be rounded to bfloat16, as tiles multiply them; on the
  // CPU alone. Without tiles nothing is rounded.
  bool may_round_to_bfloat16 = false;
  // With a table, k and v are [places.rows, kv_heads, block_size or kv_len, ...], and the sequence
  // stride is the row stride.
  KeyPlaces places;

  const int64_t* cu_seqlens_q = nullptr;   // [sequences + 1], or null
  const int64_t* cu_seqlens_kv = nullptr;  // [sequences + 1], null without it and with a table
  const int64_t* kv_lengths = nullptr;     // [sequences], or null
  const int64_t* q_positions = nullptr;    // [sequences, q_len], ragged [total], or null
  AttentionStrides position_strides;       // sequence and token

  int64_t window = kUnlimited;
  int64_t window_right = 0;
  float scale = 1.0f;
  float softcap = 0.0f;                 // 0: none
  const float* sinks = nullptr;         // [q_heads], or null
  const float* alibi_slopes = nullptr;  // [sequences, q_heads], or null
  int64_t alibi_sequence_stride = 0;

  MaskType mask_type = MaskType::kNone;
  bool mask_true_is_visible = false;  // of a bool mask
  const void* mask = nullptr;         // [sequences, q_heads, q_len, kv_len]
  AttentionStrides mask_strides;
  const bool* key_padding = nullptr;     // [sequences, kv_len]: true is a token; or null
  AttentionStrides key_padding_strides;  // sequence and token

  void* out = nullptr;  // [sequences, q_heads, q_len, value_size], elements side by side
  AttentionStrides out_strides;
  float* lse = nullptr;  // [sequences, q_heads, q_len] f32, or null
  AttentionStrides lse_strides;

  LMD_HOST_DEVICE int64_t group() const { return q_heads / kv_heads; }

  LMD_HOST_DEVICE int64_t first_query(int64_t sequence) const {
    return cu_seqlens_q == nullptr ? 0 : cu_seqlens_q[sequence];
  }
  LMD_HOST_DEVICE int64_t queries_of(int64_t sequence) const {
    return cu_seqlens_q == nullptr ? q_len : cu_seqlens_q[sequence + 1] - cu_seqlens_q[sequence];
  }
  LMD_HOST_DEVICE int64_t first_key(int64_t sequence) const {
    return cu_seqlens_kv == nullptr ? 0 : cu_seqlens_kv[sequence];
  }
  LMD_HOST_DEVICE int64_t keys_of(int64_t sequence) const {
    if (cu_seqlens_kv != nullptr) return cu_seqlens_kv[sequence + 1] - cu_seqlens_kv[sequence];
    return kv_lengths == nullptr ? kv_len : kv_lengths[sequence];
  }
  // Offset of key `key` of a sequence in k or v, in elements.
  LMD_HOST_DEVICE int64_t key_offset(const AttentionStrides& s, int64_t sequence, int64_t kv_head,
                                     int64_t key) const {
    const KeyPlace at = places.place(sequence, key);
    return at.row * s.sequence + kv_head * s.head + (first_key(sequence) + at.token) * s.token;
  }
  // The position of query `token` of a sequence.
  LMD_HOST_DEVICE int64_t position(int64_t sequence, int64_t token) const {
    if (q_positions == nullptr) {
      return aligned_position(token, queries_of(sequence), keys_of(sequence));
    }
    return q_positions[sequence * position_strides.sequence +
                       (first_query(sequence) + token) * position_strides.token];
  }
  // The keys that query `token` of a sequence can see, before masks.
  LMD_HOST_DEVICE KeyRange keys_seen(int64_t sequence, int64_t token) const {
    const int64_t keys = keys_of(sequence);
    if (mask_type != MaskType::kNone) return {0, keys};
    return visible_keys(position(sequence, token), window, window_right, keys);
  }
};

// The range of keys that queries of a sequence can see, with any keys in between.
LMD_HOST_DEVICE KeyRange keys_seen_by_queries(const SlidingWindowAttentionParams& p,
                                              int64_t sequence) {
  KeyRange seen = {0, 0};
  for (int64_t token = 0; token < p.queries_of(sequence); ++token) {
    seen = hull(seen, p.keys_seen(sequence, token));
  }
  return seen;
}

// Some queries of a sequence, with all query heads of one KV head.
struct AttentionTile {
  int64_t sequence;
  int64_t kv_head;
  int64_t first_token;
  int64_t tokens;
};

void sliding_window_attention_cpu(const SlidingWindowAttentionParams& params);
void sliding_window_attention_cuda(const SlidingWindowAttentionParams& params, void* stream);

}  // namespace lmdecode::attention

LMD_DECLARE_KERNELS(attention,
                    void sliding_window_attention_tiles(const SlidingWindowAttentionParams& params,
                                                        const AttentionTile* tiles, int64_t begin,
                                                        int64_t end, int64_t most_rows,
                                                        void* workspace);)
