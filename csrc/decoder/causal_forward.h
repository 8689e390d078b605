// A decoder-only model on rows of many sequences: from tokens to logits, with keys and values in
// paged caches. docs/reference/decoder.md (Decoder-only models) is the user's page.
// docs/reference/causal_models.md lists which architectures set which of the switches below.
//
// A step takes entries. An entry is some tokens of a sequence that follow its cached ones. Tokens
// of a prompt attend by the tiles of sliding_window_attention, generated ones by
// sliding_window_decode; the choice depends only on the entry. So a sequence's logits are bitwise
// the same for any other entries, any chunks of its prompt, and any number of threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/sliding_window_attention.h"
#include "common/half.h"
#include "decoder/decoder_layer.h"
#include "decoder/layer_state.h"
#include "decoder/per_layer_input.h"
#include "kv_cache/block_table.h"
#include "kv_cache/copy_blocks.h"
#include "kv_cache/state_slots.h"

namespace lmdecode::decoder {

// Keys and values of layers in blocks that sequences share, managed by a block table.
//
// Layers with a window free blocks that no later query can see; the others keep all. Layers of the
// same kind share one table: a block holds a stretch of positions for all of them. The blocks of a
// head lie side by side: consecutive blocks, as a prompt has, are read at the speed of memory,
// scattered ones of a few KB at half of it. docs/reference/decoder.md (Decoder-only models) is the
// user's page.

struct PagedCache {
  kv_cache::BlockTable table;     // a row a sequence
  DType dtype = DType::kFloat32;  // of keys and values, or of queries where they are int8
  bool is_int8 = false;           // keys and values are rows of attention::Int8Cell
  unsigned char* pool = nullptr;  // [layers, 2, kv_heads, num_blocks, block_size, row_size()]
  int64_t layers = 0;
  int64_t kv_heads = 0;
  int64_t head_size = 0;
  int64_t window = 0;  // 0: all positions are kept; else those before the last `window` are let go

  int64_t element_size() const { return is_int8 ? 1 : dtype == DType::kFloat32 ? 4 : 2; }
  // In elements: of a key or value; of a block of a head; of a head; of the keys, or the values, of
  // a layer.
  int64_t row_size() const { return head_size + (is_int8 ? attention::kInt8ScaleBytes : 0); }
  int64_t block_stride() const { return table.block_size * row_size(); }
  int64_t head_stride() const { return table.num_blocks * block_stride(); }
  int64_t part_stride() const { return kv_heads * head_stride(); }
  // The address of block 0.
  unsigned char* keys(int64_t layer) const {
    return pool + layer * 2 * part_stride() * element_size();
  }
  unsigned char* values(int64_t layer) const {
    return keys(layer) + part_stride() * element_size();
  }
  attention::AttentionStrides strides() const {
    return {block_stride(), head_stride(), row_size(), 1};
  }
  // The pool as copy_blocks_cpu() takes it.
  kv_cache::BlockPool block_pool() const {
    kv_cache::BlockPool blocks;
    blocks.data = pool;
    blocks.num_blocks = table.num_blocks;
    blocks.heads = layers * 2 * kv_heads;
    blocks.block_size = table.block_size;
    blocks.vector_bytes = row_size() * element_size();
    blocks.position_stride = blocks.vector_bytes;
    blocks.block_stride = block_stride() * element_size();
    blocks.head_stride = head_stride() * element_size();
    return blocks;
  }
  // The first block that a sequence of this length has to keep.
  int64_t first_kept_block(int64_t length) const {
    const int64_t first = length - window + 1;
    return window == 0 || first < 0 ? 0 : first / table.block_size;
  }
};

// The outputs of a layer's projection: queries, its own keys unless it reads an earlier layer's
// cache, and its own values unless the keys serve as values.
enum class KeySource : int32_t { kOwn = 0, kAreValues = 1, kShared = 2 };

// Sizes of heads, in layers with a window or without.
struct HeadSizes {
  int64_t kv_heads = 0;
  int64_t size = 0;
  int64_t turned = 0;  // features that a rotary embedding turns

  int64_t key_size() const { return kv_heads * size; }
};

// Settings of a layer in addition to LayerWeights.
struct CausalLayer {
  LayerWeights weights;
  PerLayerWeights per_layer;
  HeadSizes heads;
  KeySource keys = KeySource::kOwn;
  const float* query_norm = nullptr;  // see CausalModel::norms_all_heads; null: none
  const float* key_norm = nullptr;
  const float* sinks = nullptr;  // [heads]: scores without a value; null: none
  int64_t window = attention::kUnlimited;
  int64_t rotary = -1;      // which of the frequencies; -1: queries and keys are not turned
  int64_t cache = 0;        // which of the caches; -1: the layer has no attention
  int64_t cache_layer = 0;  // of the cache
  int64_t state = -1;       // offset in the model's state, in floats; -1: no state
  int64_t ffn_size = 0;     // of a layer without experts
  MixerWeights mixer;

  bool has_attention() const { return cache >= 0; }
  bool has_state() const { return state >= 0; }
};

// The input of a model for multi-token prediction, from the token's embedding and the hidden
// features that another model computed for the previous token: x = W_e norm_e(embedding) + W_h
// norm_h(hidden).
struct HiddenInput {
  NormWeights embedding_norm, hidden_norm;
  LinearWeights from_embedding, from_hidden;  // [model_size, model_size] each

  bool is_there() const { return from_hidden.out_features > 0; }
};

struct CausalModel {
  DecoderConfig config;
  DecoderWeights weights;  // embedding and layers are unused, see below
  TokenRows embedding;     // [model_size] each
  HiddenInput hidden_input;
  PerLayerModel per_layer;
  const CausalLayer* layers = nullptr;  // [config.layers]
  int64_t last_with_keys = 0;           // the last layer that keeps keys, or a state, of its own
  MixerConfig mixer;                    // of the layers that keep a state
  // Layers with a state have attention, too: queries, keys and values precede the mixer's input,
  // and attention's output precedes the mixer's.
  bool attention_beside = false;
  HeadSizes heads[2];  // of layers without a window, and with one
  int64_t num_rotary = 0;
  const float* frequencies = nullptr;    // [num_rotary, most_turned() / 2]
  const float* rotary_scales = nullptr;  // [num_rotary]
  bool norms_all_heads = false;          // norms of queries and keys are of [heads * head_size]
  bool norms_values = false;             // each head of values is divided by its root mean square
  float attention_softcap = 0.0f;
  float logits_softcap = 0.0f;
  float logits_scale = 1.0f;

  int64_t most_turned() const { return std::max(heads[0].turned, heads[1].turned); }
  // The widest of the layers with attention.
  int64_t most_queries() const { return config.heads * std::max(heads[0].size, heads[1].size); }
};

struct CausalEntry {
  int64_t sequence;
  int64_t count;       // of tokens, at least 1
  int64_t is_prompt;   // or generated
  int64_t num_logits;  // number of last tokens whose logits are returned
};

constexpr int64_t kMaxPagedCaches = 2;

// States of the layers that keep one, all of a sequence side by side.
struct StateCache {
  kv_cache::StateSlots slots;  // a row a sequence
  float* pool = nullptr;       // [num_slots, state_size]
  int64_t state_size = 0;      // 0: there are none
};

struct CausalForwardParams {
  const CausalModel* model = nullptr;
  PagedCache caches[kMaxPagedCaches];
  int64_t num_caches = 0;
  StateCache states;
  const CausalEntry* entries = nullptr;  // [num_entries], each sequence at most once
  int64_t num_entries = 0;
  const int64_t* tokens = nullptr;  // of the entries, concatenated
  int64_t max_rows = 0;             // computed together: longer steps are cut
  void* workspace = nullptr;        // causal_workspace_bytes(), aligned to 64
  float* logits = nullptr;          // [sum of num_logits, vocab]
  // [model_size] for each token: the model's HiddenInput; and the output of the final norm, or
  // null.
  const float* hidden_in = nullptr;
  float* hidden_out = nullptr;

  int64_t sequences() const { return caches[0].table.rows; }
};

// Reads the model's config and sizes only.
size_t causal_workspace_bytes(const CausalModel& model, int64_t max_rows, int64_t sequences,
                              int64_t max_blocks);

// Processes the entries, and extends the lengths of the caches' tables. On torch's threads; the
// arguments have been checked, and blocks are available. Throws std::runtime_error if a cache with
// a window runs out of blocks; the parts processed so far are then in the caches.
void causal_forward_cpu(const CausalForwardParams& params);

}  // namespace lmdecode::decoder
