// An encoder under sanitizers: a sequence depends on nothing else in the call.
#include <memory>
#include <vector>

#include "check.h"
#include "decoder/encoder_forward.h"
#include "exact_memory.h"
#include "random_weights.h"

namespace lmdecode::decoder {
namespace {

constexpr int64_t kVocab = 29, kDistances = 600;

class Model {
 public:
  // has_bias: distances instead of positions, gated layers and norms before them.
  Model(linear::LinearFormat format, bool has_bias) {
    DecoderConfig& c = model.config;
    c.layers = 2;
    c.model_size = 10;
    c.heads = c.kv_heads = 2;
    c.head_size = 7;
    c.ffn_size = 19;
    c.vocab = kVocab;
    c.position_offset = 2;
    c.norm = has_bias ? NormKind::kRmsNorm : NormKind::kLayerNorm;
    c.norm_first = c.gated = has_bias;
    c.activation = linear::Activation::kGelu;
    c.format = format;
    c.norm_epsilon = 1e-5f;
    c.attention_scale = 0.4f;
    c.embedding_scale = 1.5f;
    model.embedding = random_.floats(kVocab * c.model_size, 2.0f);
    if (has_bias) {
      model.relative_bias = random_.floats(c.layers * c.heads * (2 * kDistances - 1), 1.0f);
      model.num_distances = kDistances;
      model.has_bias_of_layers = true;
      model.final_norm = norm();
    } else {
      model.num_positions = kDistances;
      model.positions = random_.floats((kDistances + c.position_offset) * c.model_size, 1.0f);
      model.embedding_norm = norm();
    }
    for (int64_t i = 0; i < c.layers; ++i) {
      LayerWeights w;
      w.self_norm = norm();
      w.ffn_norm = norm();
      w.qkv = random_.linear(c.model_size, c.qkv_size(), format);
      w.self_out = random_.linear(c.attention_size(), c.model_size, format);
      w.ffn_up = random_.linear(c.model_size, c.ffn_size, format);
      if (c.gated) w.ffn_gate = random_.linear(c.model_size, c.ffn_size, format);
      w.ffn_down = random_.linear(c.ffn_size, c.model_size, format);
      layers_.push_back(w);
    }
    model.layers = layers_.data();
  }

  // Sequences of these lengths: the i-th of tokens that its number gives.
  std::vector<float> run(const std::vector<int64_t>& lengths,
                         const std::vector<int64_t>& numbers) const {
    const int64_t size = model.config.model_size;
    Exactly<int64_t> begins(static_cast<int64_t>(lengths.size()) + 1);
    begins[0] = 0;
    for (size_t i = 0; i < lengths.size(); ++i) {
      begins[static_cast<int64_t>(i) + 1] = begins[static_cast<int64_t>(i)] + lengths[i];
    }
    const int64_t sequences = static_cast<int64_t>(lengths.size()), rows = begins[sequences];
    Exactly<int64_t> tokens(rows), positions(rows);
    for (int64_t i = 0; i < sequences; ++i) {
      for (int64_t t = 0; t < lengths[static_cast<size_t>(i)]; ++t) {
        tokens[begins[i] + t] = (7 * t + 3 * numbers[static_cast<size_t>(i)]) % kVocab;
        positions[begins[i] + t] = t;
      }
    }
    Exactly<float> out(rows * size);
    EncoderForwardParams p;
    p.model = &model;
    p.tokens = tokens.get();
    p.positions = positions.get();
    p.row_begins = begins.get();
    p.sequences = sequences;
    Exactly<uint8_t> workspace(static_cast<int64_t>(
        encoder_workspace_bytes(model.config, encoder_group_rows(begins.get(), sequences))));
    p.workspace = workspace.get();
    p.out = out.get();
    encoder_forward_cpu(p);
    return {out.get(), out.get() + rows * size};
  }

  EncoderModel model;

 private:
  NormWeights norm() {
    return {random_.floats(model.config.model_size, 1.0f),
            model.config.norm == NormKind::kLayerNorm
                ? random_.floats(model.config.model_size, 0.1f)
                : nullptr};
  }

  RandomWeights random_;
  std::vector<LayerWeights> layers_;
};

TEST(a_sequence_in_any_company) {
  for (const auto format : {linear::LinearFormat::kFloat32, linear::LinearFormat::kBFloat16,
                            linear::LinearFormat::kInt8, linear::LinearFormat::kInt4}) {
    for (const bool has_bias : {false, true}) {
      const Model model(format, has_bias);
      // One of more rows than are computed together, and more groups than one.
      const std::vector<int64_t> lengths{3, 0, 40, 515, 1, 20, 9};
      const std::vector<float> whole = model.run(lengths, {0, 1, 2, 3, 4, 5, 6});
      int64_t begin = 0;
      for (size_t i = 0; i < lengths.size(); ++i) {
        const std::vector<float> alone = model.run({lengths[i]}, {static_cast<int64_t>(i)});
        const int64_t end = begin + lengths[i] * model.model.config.model_size;
        CHECK(std::vector<float>(whole.begin() + begin, whole.begin() + end) == alone);
        begin = end;
      }
      for (const float x : whole) CHECK(x > -1e4f && x < 1e4f);
    }
  }
}

TEST(no_sequences) {
  const Model model(linear::LinearFormat::kFloat32, true);
  CHECK(model.run({}, {}).empty());
}

}  // namespace
}  // namespace lmdecode::decoder

CHECK_MAIN()
