#include <algorithm>

#include "common/parallel_rows.h"
#include "common/split_memory.h"
#include "decoder/decoder_layer.h"
#include "decoder/decoder_tuning.h"
#include "linear/norms.h"

namespace lmdecode::decoder {

size_t input_bytes(const DecoderConfig& config, int64_t in_features, int64_t rows) {
  return config.format.has_value() ? linear_input_bytes(*config.format, in_features, rows)
                                   : linear::most_linear_input_bytes(in_features, rows);
}

size_t split_layer_buffers(const DecoderConfig& config, int64_t rows, void* memory,
                           LayerBuffers* buffers) {
  SplitMemory split(memory);
  split.take(&buffers->normed, rows * config.model_size);
  split.take(&buffers->qkv, rows * std::max(config.qkv_size(), config.widest_projection));
  split.take(&buffers->context, rows * std::max(config.attention_size(), config.widest_mixed));
  const int64_t ffn_size = std::max(config.ffn_size, config.experts.shared_size);
  split.take(&buffers->ffn, rows * ffn_size);
  size_t bytes = 0;
  for (const int64_t size :
       {config.model_size, config.attention_size(), ffn_size, config.widest_mixed}) {
    bytes = std::max(bytes, input_bytes(config, size, rows));
  }
  unsigned char* input = nullptr;
  split.take(&input, static_cast<int64_t>(bytes));
  buffers->linear_input = input;
  unsigned char* experts = nullptr;
  const size_t of_experts =
      split_experts_buffers(config.experts, config.model_size, rows, nullptr, &buffers->experts);
  split.take(&experts, static_cast<int64_t>(of_experts));
  if (experts != nullptr) {
    split_experts_buffers(config.experts, config.model_size, rows, experts, &buffers->experts);
  }
  return split.used();
}

namespace {

// x [rows, in_features] contiguous, as a product with `matrix` reads it.
linear::LinearInput prepare_rows(const linear::PackedLinear& matrix, const float* x, int64_t rows,
                                 void* scratch) {
  const int64_t size = matrix.shape.in_features;
  return prepare_linear_input(matrix.shape.format, x, size, rows, size, scratch);
}

}  // namespace

void apply_linear(const LinearWeights& weights, const float* x, int64_t rows, void* scratch,
                  linear::LinearOutput output, PreparedRows* kept) {
  PreparedRows own;
  if (kept == nullptr) kept = &own;
  output.y_stride = output.y_stride > 0 ? output.y_stride : weights.out_features;
  output.bias = weights.bias;
  for (int64_t part = 0; part < weights.num_parts; ++part) {
    const linear::PackedLinear& matrix = weights.parts[part];
    if (kept->format != matrix.shape.format) {
      kept->format = matrix.shape.format;
      kept->input = prepare_rows(matrix, x, rows, scratch);
    }
    packed_linear(matrix, kept->input, output);
    output = output.from_column(matrix.shape.out_features);
  }
}

void apply_norm(const DecoderConfig& config, const NormWeights& weights, const float* from,
                float* to, int64_t rows) {
  const int64_t size = config.model_size;
  const linear::NormParams params{
      from, size, to, size, rows, size, weights.gamma, weights.beta, config.norm_epsilon};
  config.norm == NormKind::kLayerNorm ? layer_norm(params) : rms_norm(params);
}

namespace {

class Layer {
 public:
  Layer(const DecoderConfig& config, const LayerBuffers& buffers, int64_t rows, float* x)
      : config_(config), buffers_(buffers), rows_(rows), x_(x) {}

  // The input of a sublayer.
  const float* input(const NormWeights& norm) const {
    if (!config_.norm_first || norm.gamma == nullptr) return x_;
    apply_norm(config_, norm, x_, buffers_.normed, rows_);
    return buffers_.normed;
  }

  // x += from W^T + bias, normed by out_norm if there is one; then the next norm.
  void add(const LinearWeights& weights, const NormWeights& out_norm, const NormWeights& norm,
           const float* from) const {
    if (out_norm.gamma != nullptr) {
      project(weights, from, buffers_.normed);
      add_normed(out_norm);
    } else {
      linear::LinearOutput output = output_of(weights, x_);
      output.residual = x_;
      output.residual_stride = config_.model_size;
      apply_linear(weights, from, rows_, buffers_.linear_input, output);
    }
    if (!config_.norm_first) apply_norm(config_, norm, x_, x_, rows_);
  }

  // x += the norm of buffers.normed, in place.
  void add_normed(const NormWeights& norm) const {
    apply_norm(config_, norm, buffers_.normed, buffers_.normed, rows_);
    add_rows(x_, buffers_.normed);
  }

  // The inner features of a feed-forward layer, in buffers.ffn.
  void project_ffn(const LayerWeights& weights, const float* from) const {
    if (config_.gated) {
      if (rows_ > tuning::kPairedRows && has_pair(weights)) return project_pair(weights, from);
      PreparedRows kept;
      project(weights.ffn_up, from, buffers_.ffn, linear::Activation::kNone, nullptr, &kept);
      project(weights.ffn_gate, from, buffers_.ffn, config_.activation, buffers_.ffn, &kept);
    } else {
      project(weights.ffn_up, from, buffers_.ffn, config_.activation);
    }
  }

  static bool has_pair(const LayerWeights& weights) {
    const LinearWeights &up = weights.ffn_up, &gate = weights.ffn_gate;
    return up.num_parts == 1 && gate.num_parts == 1 &&
           up.parts[0].shape.format == gate.parts[0].shape.format &&
           up.parts[0].shape.in_features == gate.parts[0].shape.in_features &&
           up.out_features == gate.out_features;
  }

  // project_ffn() for many rows: combines the outputs of both products while they are in the cache.
  void project_pair(const LayerWeights& weights, const float* from) const {
    const linear::PackedLinear& up = weights.ffn_up.parts[0];
    packed_linear_pair(up, output_of(weights.ffn_up, buffers_.ffn), weights.ffn_gate.parts[0],
                       output_of(weights.ffn_gate, buffers_.ffn, config_.activation, buffers_.ffn),
                       prepare_rows(up, from, rows_, buffers_.linear_input));
  }

  // x += experts(from).
  void add_experts(const LayerWeights& weights, const float* from) const {
    if (config_.experts.shared_size > 0) {
      project_ffn(weights, from);
      project(weights.ffn_down, buffers_.ffn, buffers_.experts.shared);
    }
    if (weights.experts_out_norm.gamma != nullptr) return add_experts_beside(weights);
    const bool has_norm = weights.ffn_out_norm.gamma != nullptr;
    ExpertsParams params = experts_of(config_.experts, weights);
    params.x = from;
    params.residual = has_norm ? nullptr : x_;
    params.out = has_norm ? buffers_.normed : x_;
    experts_cpu(params, buffers_.experts);
    if (has_norm) add_normed(weights.ffn_out_norm);
  }

  // x += norm(norm(buffers.shared) + norm(experts(x))), where the experts and their router each
  // norm x themselves.
  void add_experts_beside(const LayerWeights& weights) const {
    float* const shared = buffers_.experts.shared;
    ExpertsConfig without_shared = config_.experts;
    without_shared.shared_size = 0;
    ExpertsParams params = experts_of(without_shared, weights);
    apply_norm(config_, weights.experts_norm, x_, buffers_.normed, rows_);
    apply_norm(config_, weights.router_norm, x_, buffers_.experts.router_rows, rows_);
    params.x = buffers_.normed;
    params.router_x = buffers_.experts.router_rows;
    params.out = buffers_.normed;
    experts_cpu(params, buffers_.experts);
    apply_norm(config_, weights.experts_out_norm, buffers_.normed, buffers_.normed, rows_);
    apply_norm(config_, weights.shared_out_norm, shared, shared, rows_);
    add_rows(buffers_.normed, shared);
    add_normed(weights.ffn_out_norm);
  }

  ExpertsParams experts_of(const ExpertsConfig& config, const LayerWeights& weights) const {
    ExpertsParams params;
    params.config = &config;
    params.weights = &weights.experts;
    params.activation = config_.activation;
    params.model_size = config_.model_size;
    params.rows = rows_;
    return params;
  }

  void project(const LinearWeights& weights, const float* from, float* to,
               linear::Activation activation = linear::Activation::kNone,
               const float* multiplier = nullptr, PreparedRows* kept = nullptr) const {
    apply_linear(weights, from, rows_, buffers_.linear_input,
                 output_of(weights, to, activation, multiplier), kept);
  }

 private:
  // to += from, both [rows, model_size].
  void add_rows(float* to, const float* from) const {
    const int64_t size = config_.model_size;
    const double row_nanoseconds = tuning::kNanosecondsPerCopy * static_cast<double>(size);
    parallel_rows(rows_, row_nanoseconds, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * size; i < end * size; ++i) to[i] += from[i];
    });
  }

  // to = contiguous rows of the product with `weights`; multiplier: rows of the same shape.
  static linear::LinearOutput output_of(const LinearWeights& weights, float* to,
                                        linear::Activation activation = linear::Activation::kNone,
                                        const float* multiplier = nullptr) {
    linear::LinearOutput output;
    output.y = to;
    output.y_stride = weights.out_features;
    output.bias = weights.bias;
    output.activation = activation;
    output.multiplier = multiplier;
    output.multiplier_stride = weights.out_features;
    return output;
  }

  const DecoderConfig& config_;
  const LayerBuffers& buffers_;
  const int64_t rows_;
  float* const x_;
};

}  // namespace

void decoder_layer_cpu(const DecoderConfig& config, const LayerWeights& weights,
                       const LayerAttention& attention, const LayerBuffers& buffers, int64_t rows,
                       float* x) {
  const Layer all(config, buffers, rows, x);
  linear::LinearOutput projected;
  projected.y = buffers.qkv;
  projected.y_stride = weights.qkv_stride;
  apply_linear(weights.qkv, all.input(weights.self_norm), rows, buffers.linear_input, projected);
  const int64_t wanted = attention.self(buffers.qkv, buffers.context, x);
  if (wanted == 0) return;

  const Layer layer(config, buffers, wanted, x);
  // Before attention's output is added.
  if (config.ffn_beside) layer.project_ffn(weights, layer.input(weights.ffn_norm));
  layer.add(weights.self_out, weights.self_out_norm, weights.self_norm, buffers.context);

  if (config.memory_size > 0) {
    layer.project(weights.cross_query, layer.input(weights.cross_norm), buffers.qkv);
    attention.cross(buffers.qkv, buffers.context);
    layer.add(weights.cross_out, NormWeights{}, weights.cross_norm, buffers.context);
  }

  if (!config.ffn_beside) {
    const float* const input = layer.input(weights.ffn_norm);
    if (weights.experts.are_there()) return layer.add_experts(weights, input);
    layer.project_ffn(weights, input);
  }
  layer.add(weights.ffn_down, weights.ffn_out_norm, weights.ffn_norm, buffers.ffn);
}

}  // namespace lmdecode::decoder
