// encoder_forward, on CPU tensors alone.
#include "decoder/encoder_forward.h"

#include <optional>
#include <vector>

#include "bindings/decoder_checks.h"

namespace lmdecode::decoder {
namespace {

constexpr const char* kOp = "encoder_forward";
constexpr size_t kEncoderTensors = 7;

Tensor encoder_forward(const Tensors& weights, const Integers& config, const Numbers& numbers,
                       const std::optional<Tensor>& tokens, const std::optional<Tensor>& inputs,
                       const Tensor& positions, const Tensor& row_begins) {
  EncoderModel m;
  m.config = decoder_config(kOp, config, numbers, /*is_encoder=*/true);
  const DecoderConfig& c = m.config;
  TensorList list(kOp, "weights", weights,
                  kEncoderTensors + kEncoderLayerTensors * static_cast<size_t>(c.layers));
  m.embedding = list.next_or_null<const float>("embedding", {c.vocab, c.model_size});
  const Tensor& table = list.next_tensor();
  m.positions = list.next_or_null<const float>("positions", {-1, c.model_size});
  if (m.positions != nullptr) m.num_positions = table.size(0) - c.position_offset;
  const Tensor& bias = list.next_tensor();
  m.has_bias_of_layers = is_bias_of_layers(bias, c);
  m.relative_bias = list.next_or_null<const float>(
      "relative_bias", {m.has_bias_of_layers ? c.layers * c.heads : c.heads, -1});
  if (m.relative_bias != nullptr) {
    m.num_distances = bias.size(1) / 2 + 1;
    if (bias.size(1) % 2 == 0) {
      fail(kOp, "weights.relative_bias has shape ", shape_text(bias),
           "; expected an odd number of distances");
    }
  }
  m.embedding_norm =
      norm_weights(list, "embedding_norm_gamma", "embedding_norm_beta", c.model_size);
  m.final_norm = norm_weights(list, "final_norm_gamma", "final_norm_beta", c.model_size);
  std::vector<LayerWeights> layers;
  for (int64_t i = 0; i < c.layers; ++i) layers.push_back(layer_weights(kOp, list, c));
  m.layers = layers.data();

  if (tokens.has_value() == inputs.has_value()) {
    fail(kOp, "tokens and inputs are both ", tokens.has_value() ? "given" : "missing",
         "; expected one of them");
  }
  const Arguments arguments(kOp);
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
