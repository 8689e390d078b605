// encoder_forward, on CPU tensors alone.
#include "decoder/encoder_forward.h"

#include <optional>
#include <vector>

#include "bindings/decoder_checks.h"

namespace lmdecode::decoder {
namespace {

constexpr const char* kOp = "encoder_forward";

// The weights of an encoder but for the embedding, which may be a decoder's.
struct EncoderLayers {
  std::vector<LayerWeights> layers;
  EncoderModel model;

  explicit EncoderLayers(ModelReader reader) {
    reader.record.check_kind("\"encoder\"");
    model.config = decoder_config(reader.record, /*is_encoder=*/true);
    layers = read_layers(reader, model.config);
    read_tables(reader, model.config, &model);
    if (model.relative_bias == nullptr) return;
    if (model.num_distances % 2 == 0) {
      fail(kOp, "weights.relative_bias has ", model.num_distances,
           " distances; expected an odd number of them");
    }
    model.num_distances = model.num_distances / 2 + 1;
  }
};

Tensor encoder_forward(const Tensor& embedding, const Tensor& weights,
                       const std::optional<Tensor>& tokens, const std::optional<Tensor>& inputs,
                       const Tensor& positions, const Tensor& row_begins) {
  const Arguments arguments(kOp);
  const auto& checked = checked_model<EncoderLayers>(kOp, weights);
  EncoderModel m = checked.model;
  m.layers = checked.layers.data();
  const DecoderConfig& c = m.config;
  if (embedding.numel() > 0) {
    m.embedding =
        arguments.contiguous<const float>("embedding", embedding, {c.vocab, c.model_size});
  }
  if (tokens.has_value() == inputs.has_value()) {
    fail(kOp, "tokens and inputs are both ", tokens.has_value() ? "given" : "missing",
         "; expected one of them");
  }
  EncoderForwardParams p;
  p.model = &m;
  if (tokens.has_value()) {
    p.tokens = arguments.contiguous<const int64_t>("tokens", *tokens, {-1});
    if (m.embedding == nullptr) fail(kOp, "tokens are given; expected inputs, without embedding");
  } else {
    p.inputs = arguments.contiguous<const float>("inputs", *inputs, {-1, c.model_size});
  }
  const int64_t rows = (tokens ? *tokens : *inputs).size(0);
  p.positions = arguments.contiguous<const int64_t>("positions", positions, {rows});
  p.row_begins = arguments.contiguous<const int64_t>("row_begins", row_begins, {-1});
  p.sequences = row_begins.size(0) - 1;
  if (p.sequences < 0 || p.row_begins[0] != 0 || p.row_begins[p.sequences] != rows) {
    fail(kOp, "row_begins has ", row_begins.size(0), " entries",
         p.sequences < 0 ? "" : " that begin and end elsewhere", "; expected 0 to ", rows);
  }
  for (int64_t i = 0; i < p.sequences; ++i) {
    const int64_t length = p.row_begins[i + 1] - p.row_begins[i];
    const int64_t most = m.relative_bias != nullptr ? m.num_distances : rows;
    if (length < 0 || length > most) {
      fail(kOp, "row_begins[", i, "] is ", length, " before the next; expected 0 to ", most);
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    if (p.tokens != nullptr && (p.tokens[i] < 0 || p.tokens[i] >= c.vocab)) {
      fail(kOp, "tokens[", i, "] is ", p.tokens[i], "; expected 0 to ", c.vocab - 1);
    }
    if (m.positions != nullptr && (p.positions[i] < 0 || p.positions[i] >= m.num_positions)) {
      fail(kOp, "positions[", i, "] is ", p.positions[i], "; expected 0 to ", m.num_positions - 1);
    }
  }
  Tensor out = new_tensor(positions, {rows, c.model_size}, ScalarType::Float);
  const int64_t bytes = static_cast<int64_t>(
      encoder_workspace_bytes(c, encoder_group_rows(p.row_begins, p.sequences)));
  Tensor workspace = new_tensor(positions, {bytes}, ScalarType::Byte);
  p.workspace = workspace.mutable_data_ptr();
  p.out = static_cast<float*>(out.mutable_data_ptr());
  encoder_forward_cpu(p);
  return out;
}

}  // namespace
}  // namespace lmdecode::decoder

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("encoder_forward", TORCH_BOX(&lmdecode::decoder::encoder_forward));
}
