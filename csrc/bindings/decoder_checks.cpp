// Arguments of the decoder ops to kernel parameters.
#include "bindings/decoder_checks.h"

#include "bindings/packed_weight_checks.h"

namespace lmdecode::decoder {

NormWeights norm_weights(TensorList& list, const char* gamma, const char* beta, int64_t size) {
  NormWeights norm;
  norm.gamma = list.next_or_null<const float>(gamma, {size});
  norm.beta = list.next_or_null<const float>(beta, {size});
  return norm;
}

namespace {

LinearWeights linear_weights(const char* op, TensorList& list, const char* name, const char* bias,
                             std::optional<linear::LinearFormat> format, int64_t in_features,
                             int64_t out_features) {
  LinearWeights weights;
  weights.out_features = out_features;
  const int64_t bytes = list.next_tensor().numel();
  const uint8_t* const packed = list.next<const uint8_t>(name, {-1});
  if (reinterpret_cast<uintptr_t>(packed) % 64 != 0) {
    fail(op, "weights.", name, " is not aligned to 64 bytes; expected what pack_linear returned");
  }
  int64_t used = 0;
  const std::string full_name = std::string("weights.") + name;
  weights.num_parts =
      check_packed_parts(op, full_name, packed, bytes, in_features, out_features, format,
                         ", from config", weights.parts, kMaxLinearParts, &used);
  if (used != bytes) {
    fail(op, full_name, " has shape [", bytes, "]; expected [", used, "], from config");
  }
  weights.bias = list.next_or_null<const float>(bias, {out_features});
  return weights;
}

}  // namespace

bool is_bias_of_layers(const Tensor& bias, const DecoderConfig& c) {
  return c.layers > 1 && bias.dim() == 2 && bias.size(0) == c.layers * c.heads;
}

LayerWeights layer_weights(const char* op, TensorList& list, const DecoderConfig& c) {
  const int64_t size = c.model_size, attention = c.attention_size();
  const auto linear = [&](const char* name, const char* bias, int64_t in, int64_t out) {
    return linear_weights(op, list, name, bias, c.format, in, out);
  };
  LayerWeights w;
  w.self_norm = norm_weights(list, "self_norm_gamma", "self_norm_beta", size);
  w.qkv = linear("qkv", "qkv_bias", size, 3 * attention);
  w.self_out = linear("self_out", "self_out_bias", attention, size);
  if (c.memory_size > 0) {
    w.cross_norm = norm_weights(list, "cross_norm_gamma", "cross_norm_beta", size);
    w.cross_query = linear("cross_query", "cross_query_bias", size, attention);
    w.cross_key_value =
        linear("cross_key_value", "cross_key_value_bias", c.memory_size, 2 * attention);
    w.cross_out = linear("cross_out", "cross_out_bias", attention, size);
  }
  w.ffn_norm = norm_weights(list, "ffn_norm_gamma", "ffn_norm_beta", size);
  w.ffn_up = linear("ffn_up", "ffn_up_bias", size, c.ffn_size);
  if (c.gated) {
    w.ffn_gate = linear("ffn_gate", "ffn_gate_bias", size, c.ffn_size);
  } else {
    list.next_or_null<const uint8_t>("ffn_gate", {0});
    list.next_or_null<const float>("ffn_gate_bias", {0});
  }
  w.ffn_down = linear("ffn_down", "ffn_down_bias", c.ffn_size, size);
  return w;
}

DecoderModel::DecoderModel(const char* op, const Tensors& tensors, const Integers& sizes,
                           const Numbers& numbers)
    : config(decoder_config(op, sizes, numbers)) {
  const DecoderConfig& c = config;
  const size_t expected = kModelTensors + kLayerTensors * static_cast<size_t>(c.layers);
  TensorList list(op, "weights", tensors, expected);
  weights.embedding = list.next<const float>("embedding", {c.vocab, c.model_size});
  const Tensor& positions = list.next_tensor();
  weights.positions = list.next_or_null<const float>("positions", {-1, c.model_size});
  if (weights.positions != nullptr) {
    weights.num_positions = positions.size(0) - c.position_offset;
  }
  const Tensor& bias = list.next_tensor();
  weights.has_bias_of_layers = is_bias_of_layers(bias, c);
  weights.relative_bias = list.next_or_null<const float>(
      "relative_bias", {weights.has_bias_of_layers ? c.layers * c.heads : c.heads, -1});
  if (weights.relative_bias != nullptr) weights.num_distances = bias.size(1);
  weights.embedding_norm =
      norm_weights(list, "embedding_norm_gamma", "embedding_norm_beta", c.model_size);
  weights.final_norm = norm_weights(list, "final_norm_gamma", "final_norm_beta", c.model_size);
  weights.logits =
      linear_weights(op, list, "logits", "logits_bias", c.format, c.model_size, c.vocab);
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    layers.push_back(layer_weights(op, list, c));
  }
  weights.layers = layers.data();
}

CacheTensors::CacheTensors(const char* op, const Tensors& tensors, const DecoderConfig& c) {
  TensorList list(op, "caches", tensors, 7);
  const int64_t head = padded_to_block(c.head_size);
  check_rank(op, "caches.self_keys", tensors[0], 5, "[layers, rows, heads, capacity, head size]");
  check_rank(op, "caches.cross_values", tensors[3], 5,
             "[layers, requests, heads, source, head size]");
  const int64_t rows = caches.rows = tensors[0].size(1);
  const int64_t capacity = caches.capacity = tensors[0].size(3);
  const int64_t requests = caches.requests = tensors[3].size(1);
  const int64_t source = caches.source = tensors[3].size(3);
  if (source % kAttentionBlock != 0) {
    fail(op, "caches.cross_values has ", source, " positions; expected a multiple of ",
         kAttentionBlock);
  }
  if (rows >= kMaxDecoderSize || requests >= kMaxDecoderSize || capacity >= kMaxDecoderSize) {
    fail(op, "caches.self_keys has shape ", shape_text(tensors[0]),
         "; expected fewer than 2^31 rows and positions");
  }
  const auto self = {c.layers, rows, c.heads, capacity, head};
  caches.self_keys = list.next<float>("self_keys", self);
  caches.self_values = list.next<float>("self_values", self);
  cross_keys = list.next<float>("cross_keys", {c.layers, requests, c.heads, head, source});
  cross_values = list.next<float>("cross_values", {c.layers, requests, c.heads, source, head});
  memory_lengths = list.next<int64_t>("memory_lengths", {requests});
  caches.table = list.next<int32_t>("table", {rows, capacity});
  cached_lengths = list.next<int64_t>("cached_lengths", {requests});
  caches.cross_keys = cross_keys;
  caches.cross_values = cross_values;
  caches.memory_lengths = memory_lengths;
}

}  // namespace lmdecode::decoder
