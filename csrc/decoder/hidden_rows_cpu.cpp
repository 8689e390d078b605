#include <algorithm>

#include "decoder/hidden_rows.h"

namespace lmdecode::decoder {

void project_hidden_rows(const CausalForwardParams& params, const CausalWorkspace& w,
                         const LayerBuffers& buffers, int64_t num_segments, int64_t rows) {
  const DecoderConfig& c = params.model->config;
  const HiddenInput& input = params.model->hidden_input;
  const int64_t size = c.model_size;
  linear::LinearOutput output;
  output.y = w.x;
  apply_norm(c, input.embedding_norm, w.x, buffers.normed, rows);
  apply_linear(input.from_embedding, buffers.normed, rows, buffers.linear_input, output);
  for (int64_t i = 0; i < num_segments; ++i) {
    const Segment& segment = w.segments[i];
    std::copy_n(params.hidden_in + segment.first_token * size, segment.count * size,
                buffers.normed + segment.row * size);
  }
  apply_norm(c, input.hidden_norm, buffers.normed, buffers.normed, rows);
  output.residual = w.x;
  output.residual_stride = size;
  apply_linear(input.from_hidden, buffers.normed, rows, buffers.linear_input, output);
}

void apply_final_norm(const CausalModel& model, float* x, int64_t count) {
  if (model.weights.final_norm.gamma == nullptr) return;
  apply_norm(model.config, model.weights.final_norm, x, x, count);
}

void write_hidden_rows(const CausalForwardParams& params, const CausalWorkspace& w,
                       int64_t num_segments, int64_t rows) {
  const int64_t size = params.model->config.model_size;
  apply_final_norm(*params.model, w.x, rows);
  for (int64_t i = 0; i < num_segments; ++i) {
    const Segment& segment = w.segments[i];
    std::copy_n(w.x + segment.row * size, segment.count * size,
                params.hidden_out + segment.first_token * size);
  }
}

}  // namespace lmdecode::decoder
