#include <algorithm>

#include "common/parallel_rows.h"
#include "decoder/decoder_tuning.h"
#include "decoder/per_layer_input.h"
#include "linear/norms.h"

namespace lmdecode::decoder {

void TokenRows::read(int64_t token, int64_t size, float* to) const {
  if (packed.packed != nullptr) {
    read_packed_row(packed, token, to);
  } else if (format == EmbeddingFormat::kFloat32) {
    std::copy_n(static_cast<const float*>(values) + token * size, size, to);
  } else {
    const BFloat16* const from = static_cast<const BFloat16*>(values) + token * size;
    for (int64_t i = 0; i < size; ++i) to[i] = to_float(from[i]);
  }
}

void per_layer_inputs_cpu(const DecoderConfig& config, const PerLayerModel& model,
                          const int64_t* tokens, const float* x, int64_t rows, void* linear_input,
                          float* table_rows, float* inputs) {
  linear::LinearOutput projected;
  projected.y = inputs;
  apply_linear(model.projection, x, rows, linear_input, projected);
  const int64_t size = config.layers * model.size;
  const linear::NormParams norm{
      inputs,     model.size, inputs,  model.size,        rows * config.layers,
      model.size, model.norm, nullptr, model.norm_epsilon};
  config.norm == NormKind::kLayerNorm ? layer_norm(norm) : rms_norm(norm);
  const double row_nanoseconds = 2.0 * tuning::kNanosecondsPerCopy * static_cast<double>(size);
  parallel_rows(rows, row_nanoseconds, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* const of_table = table_rows + row * size;
      float* const to = inputs + row * size;
      model.rows.read(tokens[row], size, of_table);
      for (int64_t i = 0; i < size; ++i) to[i] += of_table[i] * model.scale;
    }
  });
}

void add_per_layer_input_cpu(const DecoderConfig& config, const PerLayerWeights& weights,
                             const LayerBuffers& buffers, const float* inputs, int64_t input_stride,
                             int64_t rows, float* x) {
  const bool has_inputs = inputs != nullptr;
  if (!has_inputs && weights.scale == nullptr) return;
  if (has_inputs) {
    linear::LinearOutput gated;
    gated.y = buffers.ffn;
    gated.activation = config.activation;
    gated.multiplier = inputs;
    gated.multiplier_stride = input_stride;
    apply_linear(weights.gate, x, rows, buffers.linear_input, gated);
    linear::LinearOutput out;
    out.y = buffers.normed;
    apply_linear(weights.out, buffers.ffn, rows, buffers.linear_input, out);
    if (weights.out_norm.gamma != nullptr) {
      apply_norm(config, weights.out_norm, buffers.normed, buffers.normed, rows);
    }
  }
  const float scale = weights.scale == nullptr ? 1.0f : *weights.scale;
  const int64_t size = config.model_size;
  const double row_nanoseconds = tuning::kNanosecondsPerCopy * static_cast<double>(size);
  parallel_rows(rows, row_nanoseconds, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * size; i < end * size; ++i) {
      x[i] = (has_inputs ? x[i] + buffers.normed[i] : x[i]) * scale;
    }
  });
}

}  // namespace lmdecode::decoder
