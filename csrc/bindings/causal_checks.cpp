#include "bindings/causal_checks.h"

#include <algorithm>

namespace lmdecode::decoder {
namespace {

constexpr size_t kConfigEntries = 38, kNumbers = 14;

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
  if (attention_features(c, heads) >= kMaxDecoderSize) {
    fail(op, "config has ", c.heads, " heads of ", heads.size, "; expected fewer than 2^31 in all");
  }
  if (heads.turned % 2 != 0 || heads.turned > heads.size) {
    fail(op, "config.", prefix, "rotary_size is ", heads.turned, "; expected an even number up to ",
         heads.size);
  }
}

}  // namespace

CausalModel causal_model_sizes(const char* op, const Integers& config, const Numbers& numbers,
                               std::vector<float>* rotary_scales) {
  IntegerList list(op, "config", config, kConfigEntries);
  CausalModel m;
  DecoderConfig& c = m.config;
  c.layers = list.next("num_layers", 1);
  c.model_size = list.next("model_size", 1);
  c.heads = list.next("num_heads", 1);
  c.kv_heads = list.next("num_kv_heads", 1);
  c.head_size = list.next("head_size", 1);
  c.ffn_size = list.next("ffn_size", 1);
  c.vocab = list.next("vocab_size", 1);
  HeadSizes& windowed = m.heads[1];
  windowed = {c.kv_heads, c.head_size, list.next("rotary_size", 0)};
  m.num_rotary = list.next("num_rotary", 0, 1 << 10);
  m.weights.num_positions = list.next("num_positions", 0);
  m.norms_all_heads = list.next_flag("norms_all_heads");
  c.norm = static_cast<NormKind>(list.next("norm", 0, 1));
  c.gated = list.next_flag("gated");
  c.activation = static_cast<linear::Activation>(list.next("activation", 1, 4));
  c.format = list.next_format();
  m.embedding.format = static_cast<EmbeddingFormat>(list.next("embedding_format", 0, 3));
  c.norm_first = true;
  c.attention_gate = list.next_flag("attention_gate");
  m.mixer.size = c.model_size;
  m.mixer.kind = static_cast<MixerKind>(list.next("mixer", 0, 3));
  const int64_t least = m.mixer.has_heads() ? 1 : 0;
  m.mixer.key_heads = list.next("mixer_key_heads", least, 1 << 16);
  m.mixer.value_heads = list.next("mixer_value_heads", least, 1 << 16);
  m.mixer.key_size = list.next("mixer_key_size", least, kMostHeadSize);
  m.mixer.value_size = list.next("mixer_value_size", least, kMostHeadSize);
  m.mixer.taps = list.next("mixer_taps", m.mixer.kind == MixerKind::kNone ? 0 : 1, kMostTaps);
  if (m.mixer.has_heads() && m.mixer.value_heads % m.mixer.key_heads != 0) {
    fail(op, "config.mixer_key_heads is ", m.mixer.key_heads,
         "; expected a divisor of mixer_value_heads, ", m.mixer.value_heads);
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
  e.count = list.next("num_experts", 0, 1 << 16);
  e.chosen = list.next("experts_per_token", e.count > 0 ? 1 : 0, e.count);
  e.size = list.next("expert_size", e.count > 0 ? 1 : 0);
  e.shared_size = list.next("shared_size", 0);
  e.router = static_cast<RouterKind>(list.next("router", 0, 2));
  e.is_normalized = list.next_flag("is_normalized");
  e.is_clamped = list.next_flag("is_clamped");
  HeadSizes& global = m.heads[0];
  global.size = list.next("global_head_size", 1);
  global.kv_heads = list.next("global_num_kv_heads", 1);
  global.turned = list.next("global_rotary_size", 0);
  check_heads(op, "", c, windowed);
  check_heads(op, "global_", c, global);
  m.norms_values = list.next_flag("value_norm");
  m.per_layer.size = list.next("per_layer_size", 0, (kMaxDecoderSize - 1) / c.layers);
  m.per_layer.rows.format = static_cast<EmbeddingFormat>(list.next("per_layer_format", 1, 3));
  c.ffn_size = std::max(c.ffn_size, m.per_layer.size);  // of scratch: layers have their own
  m.mixer.norm_first = list.next_flag("mixer_norm_first");
  m.attention_beside = list.next_flag("attention_beside");
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
  const size_t rotary = static_cast<size_t>(m.num_rotary);
  if (numbers.size() != kNumbers + rotary) {
    fail(op, "numbers has ", numbers.size(), " entries; expected ", kNumbers + rotary);
  }
  c.norm_epsilon = static_cast<float>(numbers[0]);
  c.attention_scale = static_cast<float>(numbers[1]);
  m.attention_softcap = static_cast<float>(numbers[2]);
  m.logits_softcap = static_cast<float>(numbers[3]);
  c.embedding_scale = static_cast<float>(numbers[4]);
  m.logits_scale = static_cast<float>(numbers[5]);
  e.epsilon = static_cast<float>(numbers[6]);
  e.scale = static_cast<float>(numbers[7]);
  e.alpha = static_cast<float>(numbers[8]);
  e.limit = static_cast<float>(numbers[9]);
  m.per_layer.scale = static_cast<float>(numbers[10]);
  m.per_layer.norm_epsilon = static_cast<float>(numbers[11]);
  m.mixer.least_step = static_cast<float>(numbers[12]);
  m.mixer.most_step = static_cast<float>(numbers[13]);
  for (size_t i = 0; i < rotary; ++i) {
    rotary_scales->push_back(static_cast<float>(numbers[kNumbers + i]));
  }
  return m;
}

namespace {

// In the row of a layer.
constexpr int64_t kFfnUpColumn = 17, kMixerColumn = 24, kSinksColumn = 29, kExpertsColumn = 30;
constexpr int64_t kDecayColumn = kMixerColumn + 2, kPerLayerColumn = 45;

void read_mixer(const char* op, WeightParts& parts, const MixerConfig& m, MixerWeights* w) {
  const auto next = [&](const char* name, int64_t count) {
    const float* const found = parts.next<float>(name, count);
    if (found == nullptr) fail(op, "weights have no ", name, "; expected it");
    return found;
  };
  w->convolution = next("convolution", m.taps * m.channels());
  w->convolution_bias = parts.next<float>("convolution_bias", m.channels());
  if (!m.has_heads()) return parts.skip(kSinksColumn - kDecayColumn);
  w->decay = next("decay", m.value_heads);
  w->decay_bias = next("decay_bias", m.value_heads);
  if (m.is_mamba2()) {
    w->norm = parts.next<float>("mixer_norm_gamma", m.mixed());
  } else {
    w->norm = next("mixer_norm_gamma", m.value_size);
  }
}

// Floats between the states of two layers in the model's state.
int64_t padded_state(const MixerConfig& m) { return (m.state_size() + 15) / 16 * 16; }

ExpertsWeights experts_of(WeightParts& parts, const DecoderConfig& c) {
  const ExpertsConfig& e = c.experts;
  ExpertsWeights w;
  w.router = parts.matrix("router", linear::LinearFormat::kFloat32, c.model_size, e.count);
  w.router_bias = parts.next<float>("router_bias", e.count);
  w.choice_bias = parts.next<float>("router_choice_bias", e.count);
  const auto matrices = [&](const char* name, const char* bias, int64_t in, int64_t out) {
    ExpertMatrices found;
    found.first = parts.matrices(name, c.format, e.count, in, out, &found.stride);
    found.bias = parts.next<float>(bias, e.count * out);
    return found;
  };
  w.gate = matrices("experts_gate", "experts_gate_bias", c.model_size, e.size);
  w.up = matrices("experts_up", "experts_up_bias", c.model_size, e.size);
  w.down = matrices("experts_down", "experts_down_bias", e.size, c.model_size);
  w.shared_gate = parts.next<float>("shared_gate", c.model_size);
  return w;
}

// Norms of a layer with experts beside a feed-forward layer: all four, or none.
void read_expert_norms(const char* op, WeightParts& parts, const DecoderConfig& c,
                       LayerWeights* w) {
  w->router_norm = parts.norm("router_norm_gamma", nullptr, c.model_size);
  w->experts.scales = parts.next<float>("router_scale", c.experts.count);
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
      return parts.skip();
    case EmbeddingFormat::kFloat32:
      rows->values = parts.next<float>(name, vocab * size);
      break;
    case EmbeddingFormat::kBFloat16:
      rows->values = parts.next<BFloat16>(name, vocab * size);
      break;
    case EmbeddingFormat::kPacked:
      rows->packed = parts.matrix(name, std::nullopt, size, vocab);
      return;
  }
  if (rows->values == nullptr) fail(op, "weights have no ", name, "; expected it");
}

void read_per_layer(const char* op, WeightParts& parts, CausalModel* m) {
  const DecoderConfig& c = m->config;
  PerLayerModel& p = m->per_layer;
  const int64_t size = c.layers * p.size;
  if (size == 0) return parts.skip(3);
  read_rows(op, parts, "per_layer_embedding", c.vocab, size, &p.rows);
  p.projection.parts[0] = parts.matrix("per_layer_projection", c.format, c.model_size, size);
  p.projection.out_features = size;
  p.norm = parts.next<float>("per_layer_norm_gamma", p.size);
}

void read_hidden_input(const char* op, WeightParts& parts, CausalModel* m) {
  const DecoderConfig& c = m->config;
  HiddenInput& input = m->hidden_input;
  input.embedding_norm = parts.norm("embedding_norm_gamma", nullptr, c.model_size);
  input.hidden_norm = parts.norm("hidden_norm_gamma", nullptr, c.model_size);
  int64_t count = (input.embedding_norm.gamma != nullptr) + (input.hidden_norm.gamma != nullptr);
  const auto projection = [&](const char* name, LinearWeights* weights) {
    if (!parts.has(0)) return parts.skip();
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
  } else {
    parts.skip(3);
  }
  w->scale = parts.next<float>("layer_scale", 1);
}

}  // namespace

CausalWeightsModel::CausalWeightsModel(const char* op, const ModelArguments& from,
                                       std::vector<CheckedHeader>* headers)
    : model(causal_model_sizes(op, from.config, from.numbers, &rotary_scales)) {
  const DecoderConfig& c = model.config;
  from.check_rows(op, c.layers);
  model.rotary_scales = rotary_scales.data();
  WeightParts parts = from.row(op, 0, headers);
  read_rows(op, parts, "embedding", c.vocab, c.model_size, &model.embedding);
  model.weights.positions =
      parts.next<float>("positions", model.weights.num_positions * c.model_size);
  if ((model.weights.positions == nullptr) != (model.weights.num_positions == 0)) {
    fail(op, "config.num_positions is ", model.weights.num_positions,
         "; expected 0 just where weights have no positions");
  }
  model.frequencies = parts.next<float>("rotary", model.num_rotary * model.most_turned() / 2);
  if (model.frequencies == nullptr && model.num_rotary > 0) {
    fail(op, "weights have no rotary; expected it");
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

  for (int64_t i = 1; i <= c.layers; ++i) {
    WeightParts of_layer = from.row(op, i, headers);
    const auto number = [&](const char* name, int64_t low, int64_t high) {
      return of_layer.number(i, name, low, high);
    };
    CausalLayer layer;
    const int64_t window = number("window", 0, kMaxDecoderSize - 1);
    layer.window = window == 0 ? attention::kUnlimited : window;
    layer.rotary = number("rotary", -1, model.num_rotary - 1);
    const bool has_mixers = model.mixer.kind != MixerKind::kNone;
    const bool is_beside = model.attention_beside;
    layer.cache = number("cache", has_mixers && !is_beside ? -1 : 0, kMaxPagedCaches - 1);
    layer.cache_layer =
        number("cache_layer", 0, layer.has_attention() ? c.layers - 1 : kMaxDecoderSize - 1);
    if (!layer.has_attention()) layer.state = layer.cache_layer;
    if (is_beside) layer.state = (i - 1) * padded_state(model.mixer);
    layer.keys = static_cast<KeySource>(number("keys", 0, is_beside ? 0 : 2));
    layer.ffn_size = number("ffn_size", 1, c.ffn_size);
    const bool has_state = layer.has_state();
    if (layer.keys != KeySource::kShared) model.last_with_keys = i - 1;
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
    layer.query_norm = of_layer.next<float>("query_norm_gamma", head);
    layer.key_norm = of_layer.next<float>("key_norm_gamma", key_head);
    w.self_out =
        of_layer.linear("attention_out", "attention_out_bias", c.format, mixed, c.model_size);
    w.self_out_norm = of_layer.norm("attention_out_norm_gamma", nullptr, c.model_size);
    w.ffn_norm = of_layer.norm("ffn_norm_gamma", "ffn_norm_beta", c.model_size);
    const bool has_experts = of_layer.has(kExpertsColumn - kFfnUpColumn);
    if (has_experts && c.experts.count == 0) fail(op, "layout[", i, "] has experts; expected none");
    const int64_t inner = has_experts ? c.experts.shared_size : layer.ffn_size;
    const auto linear = [&](const char* name, const char* bias, bool is_there, int64_t in,
                            int64_t out) {
      LinearWeights found;
      if (is_there) {
        found = of_layer.linear(name, bias, c.format, in, out);
      } else {
        of_layer.skip(2);
      }
      return found;
    };
    w.ffn_up = linear("ffn_up", "ffn_up_bias", inner > 0, c.model_size, inner);
    w.ffn_gate = linear("ffn_gate", "ffn_gate_bias", inner > 0 && c.gated, c.model_size, inner);
    w.ffn_down = linear("ffn_down", "ffn_down_bias", inner > 0, inner, c.model_size);
    w.ffn_out_norm = of_layer.norm("ffn_out_norm_gamma", nullptr, c.model_size);
    if (has_state) {
      read_mixer(op, of_layer, model.mixer, &layer.mixer);
    } else {
      of_layer.skip(kSinksColumn - kMixerColumn);
    }
    layer.sinks = of_layer.next<float>("sinks", c.heads);
    if (has_experts) {
      w.experts = experts_of(of_layer, c);
      read_expert_norms(op, of_layer, c, &w);
    } else {
      of_layer.skip(kPerLayerColumn - kExpertsColumn);
    }
    read_per_layer(of_layer, model, &layer.per_layer);
    if (has_state && model.mixer.is_mamba2()) {
      layer.mixer.skip = of_layer.next<float>("mixer_skip", model.mixer.value_heads);
      if (layer.mixer.skip == nullptr) fail(op, "weights have no mixer_skip; expected it");
    }
    layers.push_back(layer);
  }
  model.layers = layers.data();
}

}  // namespace lmdecode::decoder
