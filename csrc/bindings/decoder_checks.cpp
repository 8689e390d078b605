// Arguments of the decoder ops to kernel parameters.
#include "bindings/decoder_checks.h"

namespace lmdecode::decoder {

DecoderConfig common_config(ModelRecord& record, int64_t least_vocab) {
  DecoderConfig c;
  c.layers = record.num_layers();
  c.model_size = record.integer("config.model_size", 1);
  c.heads = c.kv_heads = record.integer("config.num_heads", 1);
  c.head_size = record.integer("config.head_size", 1);
  c.ffn_size = record.integer("config.ffn_size", 1);
  c.vocab = record.integer("config.vocab_size", least_vocab);
  c.norm = static_cast<NormKind>(record.choice("config.norm", kNormNames));
  c.gated = record.flag("config.gated");
  c.activation =
      static_cast<linear::Activation>(1 + record.choice("config.activation", kActivationNames));
  c.format = record.format();
  c.norm_epsilon = record.number("config.norm_epsilon");
  c.attention_scale = record.number("config.attention_scale");
  c.embedding_scale = record.number("config.embedding_scale");
  return c;
}

DecoderConfig decoder_config(ModelRecord& record, bool is_encoder) {
  DecoderConfig c = common_config(record, is_encoder ? 0 : 1);
  if (!is_encoder) c.memory_size = record.integer("config.memory_size", 1);
  c.position_offset = record.integer("config.position_offset", 0, kMaxDecoderSize - 1, 0);
  c.unplaced_token = record.integer("config.unplaced_token", -1, kMaxDecoderSize - 1, -1);
  c.norm_first = record.flag("config.norm_first");
  if (c.heads * c.head_size >= kMaxDecoderSize) {
    fail(record.op(), "config has ", c.heads, " heads of ", c.head_size,
         "; expected fewer than 2^31 in all");
  }
  c.denominator_epsilon = record.number("config.denominator_epsilon", 0.0f);
  return c;
}

std::vector<LayerWeights> read_layers(ModelReader reader, const DecoderConfig& c) {
  const int64_t size = c.model_size, attention = c.attention_size();
  std::vector<LayerWeights> layers;
  for (int64_t i = 0; i < c.layers; ++i) {
    WeightParts parts = reader.parts_of_layer(i);
    const auto linear = [&](const char* name, const char* bias, int64_t in, int64_t out) {
      return parts.linear(name, bias, c.format, in, out);
    };
    LayerWeights w;
    w.self_norm = parts.norm("self_norm_gamma", "self_norm_beta", size);
    w.qkv = linear("qkv", "qkv_bias", size, 3 * attention);
    w.self_out = linear("self_out", "self_out_bias", attention, size);
    if (c.memory_size > 0) {
      w.cross_norm = parts.norm("cross_norm_gamma", "cross_norm_beta", size);
      w.cross_query = linear("cross_query", "cross_query_bias", size, attention);
      w.cross_key_value =
          linear("cross_key_value", "cross_key_value_bias", c.memory_size, 2 * attention);
      w.cross_out = linear("cross_out", "cross_out_bias", attention, size);
    }
    w.ffn_norm = parts.norm("ffn_norm_gamma", "ffn_norm_beta", size);
    w.ffn_up = linear("ffn_up", "ffn_up_bias", size, c.ffn_size);
    if (c.gated) {
      w.ffn_gate = linear("ffn_gate", "ffn_gate_bias", size, c.ffn_size);
    }
    w.ffn_down = linear("ffn_down", "ffn_down_bias", c.ffn_size, size);
    layers.push_back(w);
  }
  return layers;
}

DecoderModel::DecoderModel(ModelReader reader) {
  reader.record.check_kind("\"decoder\"");
  config = decoder_config(reader.record);
  layers = read_layers(reader, config);
  read_tables(reader, config, &weights);
  WeightParts parts = reader.parts();
  if (!parts.has("logits")) return;
  weights.logits =
      parts.linear("logits", "logits_bias", config.format, config.model_size, config.vocab);
}

DecoderWeights DecoderModel::with(const char* op, const Tensor& embedding) const {
  if (weights.logits.out_features == 0) fail(op, "weights have no logits; expected them");
  DecoderWeights all = weights;
  all.layers = layers.data();
  all.embedding = Arguments(op).contiguous<const float>("embedding", embedding,
                                                        {config.vocab, config.model_size});
  return all;
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
