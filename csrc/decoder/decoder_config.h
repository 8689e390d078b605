// A transformer decoder, with cross-attention or without: its sizes and switches, and where its
// weights are. docs/reference/decoder.md is the user's page.
#pragma once

#include <cstdint>
#include <optional>

#include "linear/packed_linear.h"

namespace lmdecode::decoder {

// A feed-forward layer of experts: sizes, switches, and where its weights are.
// docs/reference/causal_models.md lists which architectures set which of the switches.

// The weights of a row's experts: softmax of all logits, softmax of the chosen ones, or the sigmoid
// of each.
enum class RouterKind : int32_t { kSoftmax = 0, kSoftmaxOfChosen = 1, kSigmoid = 2 };

struct ExpertsConfig {
  int64_t count = 0;        // 0: no layer has experts
  int64_t chosen = 0;       // experts of a row
  int64_t size = 0;         // inner features of an expert
  int64_t shared_size = 0;  // of the expert that each row has, ffn_up and so on; 0: none
  RouterKind router = RouterKind::kSoftmax;
  bool is_normalized = false;  // weights are divided by their sum + epsilon
  bool is_clamped = false;     // see below
  float epsilon = 0.0f;
  float scale = 1.0f;  // last factor of the weights
  // Clamped experts compute min(gate, limit) * sigmoid(alpha * min(gate, limit)) * (clamp(up,
  // -limit, limit) + 1) instead of activation(gate) * up.
  float alpha = 0.0f;
  float limit = 0.0f;
};

// The matrices of one kind of all experts, concatenated, of one format.
struct ExpertMatrices {
  linear::PackedLinear first;
  int64_t stride = 0;           // bytes from an expert's to the next one's
  const float* bias = nullptr;  // [count, out_features] or null

  linear::PackedLinear at(int64_t expert) const {
    return {first.shape, static_cast<const char*>(first.packed) + expert * stride};
  }
  const float* bias_at(int64_t expert) const {
    return bias == nullptr ? nullptr : bias + expert * first.shape.out_features;
  }
};

struct ExpertsWeights {
  linear::PackedLinear router;         // [count, model_size] float32; no bytes: no experts
  const float* router_bias = nullptr;  // [count] or null: added to logits
  const float* choice_bias = nullptr;  // [count] or null: added to the scores that choose experts
  const float* scales = nullptr;       // [count] or null: last factors of the weights
  ExpertMatrices gate;                 // [size, model_size]
  ExpertMatrices up;                   // likewise
  ExpertMatrices down;                 // [model_size, size]
  const float* shared_gate = nullptr;  // [model_size] or null: its sigmoid scales the shared one

  bool are_there() const { return router.packed != nullptr; }
};

enum class NormKind : int32_t { kLayerNorm = 0, kRmsNorm = 1 };

struct DecoderConfig {
  int64_t layers = 0;
  int64_t model_size = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;  // divides heads
  int64_t head_size = 0;
  int64_t ffn_size = 0;
  int64_t vocab = 0;
  int64_t memory_size = 0;      // features of the encoder's output; 0: no cross-attention
  int64_t position_offset = 0;  // row of the position table that position 0 has
  int64_t unplaced_token = -1;  // token without a position embedding; -1: none
  NormKind norm = NormKind::kLayerNorm;
  bool norm_first = false;  // before each sublayer, or after its residual
  bool gated = false;
  bool ffn_beside = false;  // the feed-forward layer reads what attention reads; not with experts
  linear::Activation activation = linear::Activation::kRelu;
  // Format of every linear weight; without it each has its own.
  std::optional<linear::LinearFormat> format = linear::LinearFormat::kFloat32;
  float norm_epsilon = 0.0f;
  float attention_scale = 1.0f;
  float denominator_epsilon = 0.0f;  // added to the sum that softmax divides by
  float embedding_scale = 1.0f;
  ExpertsConfig experts;  // of layers that have any: these have no gated layer but a shared one

  bool attention_gate = false;    // after queries, keys and values, [attention_size()]
  int64_t widest_projection = 0;  // of layers with something in attention's place, or 0
  int64_t widest_mixed = 0;       // likewise: input of their last projection

  int64_t attention_size() const { return heads * head_size; }
  int64_t key_size() const { return kv_heads * head_size; }
  int64_t qkv_size() const { return attention_size() * (attention_gate ? 2 : 1) + 2 * key_size(); }
};

struct NormWeights {
  const float* gamma = nullptr;  // [model_size]; null: no norm
  const float* beta = nullptr;   // [model_size] or null
};

// Queries, keys, values and a gate may each have their own format: the weight then consists of
// parts, with concatenated outputs.
constexpr int64_t kMaxLinearParts = 4;

struct LinearWeights {
  linear::PackedLinear parts[kMaxLinearParts];
  int64_t num_parts = 1;
  int64_t out_features = 0;     // of all parts
  const float* bias = nullptr;  // [out_features] or null
};

struct LayerWeights {
  NormWeights self_norm;
  LinearWeights qkv;       // queries, keys and values, concatenated
  int64_t qkv_stride = 0;  // of its output rows; 0: its own features
  LinearWeights self_out;
  NormWeights self_out_norm;  // of self-attention's output, before the residual
  NormWeights cross_norm;
  LinearWeights cross_query;
  LinearWeights cross_key_value;  // of the memory, once a request
  LinearWeights cross_out;
  NormWeights ffn_norm;
  LinearWeights ffn_up;
  LinearWeights ffn_gate;  // where the config is gated: activation(gate) * up
  LinearWeights ffn_down;
  ExpertsWeights experts;  // where there are any, ffn_up and so on are the shared expert's
  // In layers with experts: norms of the inputs of the router and of the experts (without gamma:
  // the output of ffn_norm), and of the outputs of the shared expert and of the others.
  NormWeights router_norm, experts_norm, shared_out_norm, experts_out_norm;
  NormWeights ffn_out_norm;  // of the feed-forward layer's output, before the residual
};

struct DecoderWeights {
  const float* embedding = nullptr;      // [vocab, model_size]
  const float* positions = nullptr;      // [num_positions, model_size] or null
  int64_t num_positions = 0;             // of the table, after position_offset
  const float* relative_bias = nullptr;  // [heads, num_distances] by distance, or null
  int64_t num_distances = 0;
  bool has_bias_of_layers = false;  // relative_bias is [layers, heads, num_distances]
  NormWeights embedding_norm;
  NormWeights final_norm;
  LinearWeights logits;
  const LayerWeights* layers = nullptr;  // [config.layers]
};

}  // namespace lmdecode::decoder
