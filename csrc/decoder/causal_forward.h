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

#include "decoder/decoder_layer.h"
#include "decoder/layer_state.h"
#include "decoder/paged_cache.h"
#include "decoder/per_layer_input.h"
#include "kv_cache/state_slots.h"

namespace lmdecode::decoder {

// What a layer's projection gives: queries and, unless it reads the cache of a layer before it,
// keys and, unless these are its values, too, values.
enum class KeySource : int32_t { kOwn = 0, kAreValues = 1, kShared = 2 };

// Sizes of heads, of layers with a window or of those without.
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
  const float* sinks = nullptr;  // [heads]: of scores without a value; null: none
  int64_t window = attention::kUnlimited;
  int64_t rotary = -1;      // which of the frequencies; -1: queries and keys are not turned
  int64_t cache = 0;        // which of the caches; -1: the layer has no attention
  int64_t cache_layer = 0;  // of the cache
  int64_t state = -1;       // floats before its state in that of the model; -1: it keeps none
  int64_t ffn_size = 0;     // of a layer without experts
  MixerWeights mixer;

  bool has_attention() const { return cache >= 0; }
  bool has_state() const { return state >= 0; }
};

// Of a model whose rows begin with a projection of what another model computed of the token before,
// and of the token's embedding: x = W_e norm_e(embedding) + W_h norm_h(hidden).
struct HiddenInput {
  NormWeights embedding_norm, hidden_norm;
  LinearWeights from_embedding, from_hidden;  // [model_size, model_size] each

  bool is_there() const { return from_hidden.out_features > 0; }
};

struct CausalModel {
  DecoderConfig config;
  DecoderWeights weights;  // embedding and layers are these instead:
  TokenRows embedding;     // [model_size] each
  HiddenInput hidden_input;
  PerLayerModel per_layer;
  const CausalLayer* layers = nullptr;  // [config.layers]
  int64_t last_with_keys = 0;           // the last layer that keeps keys, or a state, of its own
  MixerConfig mixer;                    // of the layers that keep a state
  // Layers with a state have attention, too: queries, keys and values stand before what the mixer
  // reads, and what attention gives before what the mixer gives.
  bool attention_beside = false;
  HeadSizes heads[2];  // of layers without a window, and of those with one
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
  int64_t num_logits;  // that are wanted: of the last so many tokens
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
  const int64_t* tokens = nullptr;  // of the entries, one behind the other
  int64_t max_rows = 0;             // that are computed together: longer steps are cut
  void* workspace = nullptr;        // causal_workspace_bytes(), aligned to 64
  float* logits = nullptr;          // [sum of num_logits, vocab]
  // Of all tokens, [model_size] each: what the model's HiddenInput reads; and, unless it is null,
  // for what is behind the final norm.
  const float* hidden_in = nullptr;
  float* hidden_out = nullptr;

  int64_t sequences() const { return caches[0].table.rows; }
};

// model needs its config and its sizes alone.
size_t causal_workspace_bytes(const CausalModel& model, int64_t max_rows, int64_t sequences,
                              int64_t max_blocks);

// Processes the entries, and extends the lengths of the caches' tables. On torch's threads; the
// arguments have been checked, and blocks are available. Throws std::runtime_error if a cache with
// a window runs out of blocks; the parts processed so far are then in the caches.
void causal_forward_cpu(const CausalForwardParams& params);

}  // namespace lmdecode::decoder
