#include "bindings/causal_checks.h"

#include <algorithm>
#include <limits>

namespace lmdecode::decoder {
namespace {

// Features of queries, the gate where there is one, keys and values.
int64_t attention_features(const DecoderConfig& c, const HeadSizes& heads) {
  return c.heads * heads.size * (c.attention_gate ? 2 : 1) + 2 * heads.key_size();
}

// prefix: of the names of these sizes.
void check_heads(const char* op, const char* prefix, const DecoderConfig& c,
                 const HeadSizes& heads) {
  if (c.heads % heads.kv_heads != 0) {
    fail(op, "config.", prefix, "num_kv_heads is ", heads.kv_heads,
         "; expected a divisor of num_heads, ", c.heads);
  }
  if (heads.size > kMaxDecoderSize / c.heads || attention_features(c, heads) >= kMaxDecoderSize) {
    fail(op, "config has ", c.heads, " heads of ", heads.size, "; expected fewer than 2^31 in all");
  }
  if (heads.turned % 2 != 0 || heads.turned > heads.size) {
    fail(op, "config.", prefix, "rotary_size is ", heads.turned, "; expected an even number up to ",
         heads.size);
  }
}

// Sizes and switches.
CausalModel causal_model(ModelRecord& record, std::vector<float>* rotary_scales) {
  const char* const op = record.op();
  const auto integer = [&](const char* name, int64_t low, int64_t high = kMaxDecoderSize - 1,
                           std::optional<int64_t> absent = std::nullopt) {
    return record.integer(std::string("config.") + name, low, high, absent);
  };
  const auto flag = [&](const char* name) { return integer(name, 0, 1, 0) != 0; };
  const auto number = [&](const char* name, std::optional<float> absent = std::nullopt) {
    return record.number(std::string("config.") + name, absent);
  };
  CausalModel m;
  DecoderConfig& c = m.config = common_config(record, 1);
  c.gated = integer("gated", 0, 1) != 0;
  c.kv_heads = integer("num_kv_heads", 1);
  HeadSizes& windowed = m.heads[1];
  windowed = {c.kv_heads, c.head_size, integer("rotary_size", 0)};
  *rotary_scales = record.numbers("config.rotary_scales");
  m.num_rotary = static_cast<int64_t>(rotary_scales->size());
  m.norms_all_heads = record.integer("norms_all_heads", 0, 1) != 0;
  m.embedding.format = static_cast<EmbeddingFormat>(record.integer("embedding_format", 0, 3));
  c.norm_first = true;
  c.attention_gate = flag("attention_gate");
  m.mixer.size = c.model_size;
  if (record.has("config.mixer.kind")) {
    m.mixer.kind = static_cast<MixerKind>(1 + record.choice("config.mixer.kind", kMixerNames));
  }
  if (m.mixer.kind != MixerKind::kNone) m.mixer.taps = integer("mixer.taps", 1, kMostTaps);
  if (m.mixer.kind == MixerKind::kShortConvolution) {
    integer("mixer.size", c.model_size, c.model_size);
  }
  if (m.mixer.has_heads()) {
    const bool is_mamba2 = m.mixer.is_mamba2();
    const int64_t most = 1 << 16;
    m.mixer.key_heads = integer(is_mamba2 ? "mixer.num_groups" : "mixer.num_key_heads", 1, most);
    m.mixer.value_heads = integer(is_mamba2 ? "mixer.num_heads" : "mixer.num_value_heads", 1, most);
    m.mixer.key_size = integer("mixer.key_size", 1, kMostHeadSize);
    m.mixer.value_size = integer("mixer.value_size", 1, kMostHeadSize);
    if (m.mixer.value_heads % m.mixer.key_heads != 0) {
      fail(op, "config.mixer.", is_mamba2 ? "num_groups" : "num_key_heads", " is ",
           m.mixer.key_heads, "; expected a divisor of ", m.mixer.value_heads);
    }
  }
  if (m.mixer.is_mamba2()) {
    m.mixer.norm_first = flag("mixer.norm_first");
    m.mixer.least_step = number("mixer.least_step", 0.0f);
    // Absent: no limit.
    m.mixer.most_step = number("mixer.most_step", std::numeric_limits<float>::infinity());
  }
  if (m.mixer.kind != MixerKind::kNone) {
    c.widest_projection = m.mixer.projected();
    c.widest_mixed = m.mixer.mixed();
    if (c.widest_projection >= kMaxDecoderSize) {
      fail(op, "config has a mixer of ", c.widest_projection,
           " features; expected fewer than 2^31");
    }
  }
  ExpertsConfig& e = c.experts;
  e.count = integer("experts.num_experts", 0, 1 << 16, 0);
  if (e.count > 0) {
    e.chosen = integer("experts.num_chosen", 1, e.count);
    e.size = integer("experts.size", 1);
    e.shared_size = integer("experts.shared_size", 0, kMaxDecoderSize - 1, 0);
    e.router = static_cast<RouterKind>(record.choice("config.experts.router", kRouterNames));
    e.is_normalized = flag("experts.normalized");
    e.is_clamped = record.has("config.experts.limit");
    e.epsilon = number("experts.epsilon", 0.0f);
    e.scale = number("experts.scale");
    e.alpha = number("experts.alpha", e.is_clamped ? std::nullopt : std::optional(0.0f));
    e.limit = number("experts.limit", 0.0f);
  }
  c.ffn_beside = flag("ffn_beside");
  if (c.ffn_beside && e.count > 0) {
    fail(op, "config.ffn_beside is 1; expected 0 with experts");
  }
  HeadSizes& global = m.heads[0];
  global.size = integer("global_head_size", 1);
  global.kv_heads = integer("global_num_kv_heads", 1);
  global.turned = integer("global_rotary_size", 0);
  check_heads(op, "", c, windowed);
  check_heads(op, "global_", c, global);
  m.norms_values = flag("value_norm");
  m.per_layer.size = integer("per_layer_size", 0, (kMaxDecoderSize - 1) / c.layers, 0);
  if (m.per_layer.size > 0) {
    m.per_layer.rows.format =
        static_cast<EmbeddingFormat>(record.integer("per_layer_format", 1, 3));
  }
  c.ffn_size = std::max(c.ffn_size, m.per_layer.size);  // of scratch: layers have their own
  m.attention_beside = flag("attention_beside");
  if (m.attention_beside && (!m.mixer.is_mamba2() || c.attention_gate)) {
    fail(op, "config.attention_beside is 1; expected 0 without Mamba-2, and with a gate");
  }
  const int64_t attention =
      std::max(attention_features(c, windowed), attention_features(c, global));
  const int64_t projected = c.widest_projection, mixed = c.widest_mixed;  // of the mixer
  c.widest_projection = m.attention_beside ? attention + projected : std::max(attention, projected);
  c.widest_mixed =
      m.attention_beside ? m.most_queries() + mixed : std::max(m.most_queries(), mixed);
  if (c.widest_projection >= kMaxDecoderSize) {
    fail(op, "config has layers of ", c.widest_projection, " features; expected fewer than 2^31");
  }
  m.attention_softcap = number("attention_softcap", 0.0f);
  m.logits_softcap = number("logits_softcap", 0.0f);
  m.logits_scale = number("logits_scale");
  m.per_layer.scale = number("per_layer_scale");
  m.per_layer.norm_epsilon = number("per_layer_epsilon", 0.0f);
  return m;
}

void read_mixer(WeightParts& parts, const MixerConfig& m, MixerWeights* w) {
  w->convolution = parts.needed("convolution", m.taps * m.channels());
  w->convolution_bias = parts.floats("convolution_bias", m.channels());
  if (!m.has_heads()) return;
  w->decay = parts.needed("decay", m.value_heads);
  w->decay_bias = parts.needed("decay_bias", m.value_heads);
  if (m.is_mamba2()) {
    w->norm = parts.floats("mixer_norm_gamma", m.mixed());
    w->skip = parts.needed("mixer_skip", m.value_heads);
  } else {
    w->norm = parts.needed("mixer_norm_gamma", m.value_size);
  }
}

ExpertsWeights experts_of(WeightParts& parts, const DecoderConfig& c) {
  const ExpertsConfig& e = c.experts;
  ExpertsWeights w;
  w.router = parts.matrix("router", linear::LinearFormat::kFloat32, c.model_size, e.count);
  w.router_bias = parts.floats("router_bias", e.count);
  w.choice_bias = parts.floats("router_choice_bias", e.count);
  const auto matrices = [&](const char* name, const char* bias, int64_t in, int64_t out) {
    ExpertMatrices found;
    found.first = parts.matrices(name, c.format, e.count, in, out, &found.stride);
    found.bias = parts.floats(bias, e.count * out);
    return found;
  };
  w.gate = matrices("experts_gate", "experts_gate_bias", c.model_size, e.size);
  w.up = matrices("experts_up", "experts_up_bias", c.model_size, e.size);
  w.down = matrices("experts_down", "experts_down_bias", e.size, c.model_size);
  w.shared_gate = parts.floats("shared_gate", c.model_size);
  return w;
}

// Norms of a layer with experts beside a feed-forward layer: all four, or none.
void read_expert_norms(const char* op, WeightParts& parts, const DecoderConfig& c,
                       LayerWeights* w) {
  w->router_norm = parts.norm("router_norm_gamma", nullptr, c.model_size);
  w->experts.scales = parts.floats("router_scale", c.experts.count);
  w->experts_norm = parts.norm("experts_norm_gamma", nullptr, c.model_size);
  w->experts_out_norm = parts.norm("experts_out_norm_gamma", nullptr, c.model_size);
  w->shared_out_norm = parts.norm("shared_out_norm_gamma", nullptr, c.model_size);
  int64_t count = 0;
  for (const NormWeights* norm :
       {&w->router_norm, &w->experts_norm, &w->experts_out_norm, &w->shared_out_norm}) {
    count += norm->gamma != nullptr ? 1 : 0;
  }
  if (count == 0) return;
  if (count < 4 || w->ffn_out_norm.gamma == nullptr || c.experts.shared_size == 0) {
    fail(op, "weights have ", count,
         " norms of experts; expected 4, with a shared expert and ffn_out_norm_gamma, or none");
  }
}

// Rows of tokens that are no matrix of products.
void read_rows(const char* op, WeightParts& parts, const char* name, int64_t vocab, int64_t size,
               TokenRows* rows) {
  switch (rows->format) {
    case EmbeddingFormat::kLogits:
      return;
    case EmbeddingFormat::kFloat32:
      rows->values = parts.floats(name, vocab * size);
      break;
    case EmbeddingFormat::kBFloat16:
      rows->values = parts.values<BFloat16>(name, vocab * size);
      break;
    case EmbeddingFormat::kPacked:
      rows->packed = parts.matrix(name, std::nullopt, size, vocab);
      return;
  }
  if (rows->values == nullptr) fail(op, "weights.", name, " is absent; expected it");
}

void read_per_layer(const char* op, WeightParts& parts, CausalModel* m) {
  const DecoderConfig& c = m->config;
  PerLayerModel& p = m->per_layer;
  const int64_t size = c.layers * p.size;
  if (size == 0) return;
  read_rows(op, parts, "per_layer_embedding", c.vocab, size, &p.rows);
  p.projection.parts[0] = parts.matrix("per_layer_projection", c.format, c.model_size, size);
  p.projection.out_features = size;
  p.norm = parts.floats("per_layer_norm_gamma", p.size);
}

void read_hidden_input(const char* op, WeightParts& parts, CausalModel* m) {
  const DecoderConfig& c = m->config;
  HiddenInput& input = m->hidden_input;
  input.embedding_norm = parts.norm("embedding_norm_gamma", nullptr, c.model_size);
  input.hidden_norm = parts.norm("hidden_norm_gamma", nullptr, c.model_size);
  int64_t count = (input.embedding_norm.gamma != nullptr) + (input.hidden_norm.gamma != nullptr);
  const auto projection = [&](const char* name, LinearWeights* weights) {
    if (!parts.has(name)) return;
    weights->parts[0] = parts.matrix(name, c.format, c.model_size, c.model_size);
    weights->out_features = c.model_size;
    ++count;
  };
  projection("embedding_projection", &input.from_embedding);
  projection("hidden_projection", &input.from_hidden);
  if (count == 0 || count == 4) return;
  fail(op, "weights have ", count, " norms and projections of hidden rows; expected 4, or none");
}

void read_per_layer(WeightParts& parts, const CausalModel& m, PerLayerWeights* w) {
  const int64_t size = m.config.model_size;
  if (m.per_layer.size > 0) {
    w->gate.parts[0] = parts.matrix("per_layer_gate", m.config.format, size, m.per_layer.size);
    w->out.parts[0] = parts.matrix("per_layer_out", m.config.format, m.per_layer.size, size);
    w->gate.out_features = m.per_layer.size;
    w->out.out_features = size;
    w->out_norm = parts.norm("per_layer_out_norm_gamma", nullptr, size);
  }
  w->scale = parts.floats("layer_scale", 1);
}

}  // namespace

CausalWeightsModel::CausalWeightsModel(ModelReader reader) {
  ModelRecord& record = reader.record;
  const char* const op = record.op();
  record.check_kind("\"causal\"");
  model = causal_model(record, &rotary_scales);
  const DecoderConfig& c = model.config;
  model.rotary_scales = rotary_scales.data();
  WeightParts parts = reader.parts();
  read_rows(op, parts, "embedding", c.vocab, c.model_size, &model.embedding);
  model.weights.positions = parts.table("positions", c.model_size, &model.weights.num_positions);
  model.frequencies = parts.floats("rotary", model.num_rotary * model.most_turned() / 2);
  if (model.frequencies == nullptr && model.num_rotary > 0 && model.most_turned() > 0) {
    fail(op, "weights.rotary is absent; expected it");
  }
  model.weights.final_norm = parts.norm("final_norm_gamma", "final_norm_beta", c.model_size);
  model.weights.logits = parts.linear("logits", "logits_bias", c.format, c.model_size, c.vocab);
  if (model.embedding.format == EmbeddingFormat::kLogits) {
    if (model.weights.logits.num_parts != 1) {
      fail(op, "weights.logits has ", model.weights.logits.num_parts,
           " parts; expected one, as it is the embedding");
    }
    model.embedding.packed = model.weights.logits.parts[0];
  }
  read_per_layer(op, parts, &model);
  read_hidden_input(op, parts, &model);

  const auto of_layers = [&](const char* name, int64_t low, int64_t high, int64_t absent) {
    return record.integers(std::string("config.") + name, c.layers, low, high, absent);
  };
  const Integers windows = of_layers("windows", 1, kMaxDecoderSize - 1, 0);
  const Integers rotary = of_layers("rotary", 0, model.num_rotary - 1, -1);
  const Integers ffn_sizes = of_layers("ffn_sizes", 1, c.ffn_size, c.ffn_size);
  const Integers shared_keys = of_layers("shared_keys", 0, c.layers - 1, -1);
  const Integers keys_are_values = of_layers("keys_are_values", 0, 1, 0);
  const bool has_mixers = model.mixer.kind != MixerKind::kNone;
  const Integers mixers = of_layers("mixer.layers", 0, 1, 0);
  const Integers experts = of_layers("experts.layers", 0, 1, 0);
  const auto has = [](const Integers& of, int64_t value) {
    return std::find(of.begin(), of.end(), value) != of.end();
  };
  if (has_mixers && (!has(mixers, 1) || (!model.attention_beside && !has(mixers, 0)))) {
    fail(op,
         "config.mixer.layers are all alike; expected a layer with the mixer, and with attention");
  }
  for (int64_t i = 0; i < c.layers; ++i) {
    WeightParts of_layer = reader.parts_of_layer(i);
    const auto at = [&](const Integers& of) { return of[static_cast<size_t>(i)]; };
    const std::string prefix = "layers." + std::to_string(i) + ".";
    CausalLayer layer;
    const int64_t window = at(windows);
    layer.window = window == 0 ? attention::kUnlimited : window;
    layer.rotary = at(rotary);
    layer.ffn_size = at(ffn_sizes);
    const bool has_state = has_mixers && at(mixers) != 0;
    // In steps of 16 floats, and none within another: whoever packs sees to it.
    if (has_state) layer.state = record.integer(prefix + "state", 0);
    if (!has_state || model.attention_beside) {
      layer.cache = record.integer(prefix + "cache", 0, kMaxPagedCaches - 1);
      layer.cache_layer = record.integer(prefix + "cache_layer", 0, c.layers - 1);
      layer.keys = at(shared_keys) >= 0       ? KeySource::kShared
                   : at(keys_are_values) != 0 ? KeySource::kAreValues
                                              : KeySource::kOwn;
    } else {
      layer.cache = -1;
    }
    if (has_state && layer.keys != KeySource::kOwn) {
      fail(op, prefix, "state is there with shared_keys or keys_are_values; expected neither");
    }
    if (layer.keys != KeySource::kShared) model.last_with_keys = i;
    layer.heads = model.heads[window == 0 ? 0 : 1];
    LayerWeights& w = layer.weights;
    const int64_t query_size = c.heads * layer.heads.size, key_size = layer.heads.key_size();
    int64_t mixed = query_size;
    int64_t projected = query_size * (c.attention_gate ? 2 : 1);
    if (layer.keys != KeySource::kShared) projected += key_size;
    w.qkv_stride = projected;
    if (layer.keys != KeySource::kShared) w.qkv_stride += key_size;
    if (layer.keys == KeySource::kOwn) projected += key_size;
    if (!layer.has_attention()) projected = w.qkv_stride = mixed = 0;
    if (has_state) {
      projected += model.mixer.projected();
      w.qkv_stride = projected;
      mixed += model.mixer.mixed();
    }
    const int64_t head = model.norms_all_heads ? query_size : layer.heads.size;
    const int64_t key_head = model.norms_all_heads ? key_size : layer.heads.size;
    w.self_norm = of_layer.norm("attention_norm_gamma", "attention_norm_beta", c.model_size);
    w.qkv = of_layer.linear("qkv", "qkv_bias", c.format, c.model_size, projected);
    layer.query_norm = of_layer.floats("query_norm_gamma", head);
    layer.key_norm = of_layer.floats("key_norm_gamma", key_head);
    w.self_out =
        of_layer.linear("attention_out", "attention_out_bias", c.format, mixed, c.model_size);
    w.self_out_norm = of_layer.norm("attention_out_norm_gamma", nullptr, c.model_size);
    w.ffn_norm = of_layer.norm("ffn_norm_gamma", "ffn_norm_beta", c.model_size);
    const bool has_experts = c.experts.count > 0 && at(experts) != 0;
    const int64_t inner = has_experts ? c.experts.shared_size : layer.ffn_size;
    const auto linear = [&](const char* name, const char* bias, bool is_there, int64_t in,
                            int64_t out) {
      return is_there ? of_layer.linear(name, bias, c.format, in, out) : LinearWeights();
    };
    w.ffn_up = linear("ffn_up", "ffn_up_bias", inner > 0, c.model_size, inner);
    w.ffn_gate = linear("ffn_gate", "ffn_gate_bias", inner > 0 && c.gated, c.model_size, inner);
    w.ffn_down = linear("ffn_down", "ffn_down_bias", inner > 0, inner, c.model_size);
    w.ffn_out_norm = of_layer.norm("ffn_out_norm_gamma", nullptr, c.model_size);
    if (has_state) read_mixer(of_layer, model.mixer, &layer.mixer);
    layer.sinks = of_layer.floats("sinks", c.heads);
    if (has_experts) {
      w.experts = experts_of(of_layer, c);
      read_expert_norms(op, of_layer, c, &w);
    }
    read_per_layer(of_layer, model, &layer.per_layer);
    layers.push_back(layer);
  }
  model.layers = layers.data();
}

}  // namespace lmdecode::decoder
