// One decoder layer on the rows of a step: self-attention, cross-attention, feed-forward.
#pragma once

#include "decoder/decoder_config.h"
#include "decoder/experts.h"

namespace lmdecode::decoder {

// Attention of a layer's rows, wherever keys and values are kept.
class LayerAttention {
 public:
  // Keys and values of qkv [rows, qkv_size], which may be overwritten, to the cache; out [rows,
  // attention_size]. Returns of how many rows the layer's output is wanted: where not of all, x and
  // out have these first.
  virtual int64_t self(float* qkv, float* out, float* x) const = 0;
  // Where the layer has cross-attention: queries and out [rows, attention_size].
  virtual void cross(const float* queries, float* out) const = 0;

 protected:
  ~LayerAttention() = default;
};

// Scratch for a number of rows; each part aligned to 64.
struct LayerBuffers {
  float* normed = nullptr;   // [rows, model_size]
  float* qkv = nullptr;      // [rows, qkv_size]
  float* context = nullptr;  // [rows, attention_size]
  float* ffn = nullptr;      // [rows, ffn_size], or of a shared expert
  ExpertsBuffers experts;
  void* linear_input = nullptr;
};

// Deals out `memory`; with null it only counts. Returns the bytes.
size_t split_layer_buffers(const DecoderConfig& config, int64_t rows, void* memory,
                           LayerBuffers* buffers);

// Scratch of apply_linear() with weights of this many inputs.
size_t input_bytes(const DecoderConfig& config, int64_t in_features, int64_t rows);

// Rows of x in scratch, as products of a format read them.
struct PreparedRows {
  std::optional<linear::LinearFormat> format;
  linear::LinearInput input;
};

// y = activation(x W^T + bias) and so on, x [rows, in_features] contiguous; scratch: input_bytes().
// kept: what the scratch holds of the same x, before and afterwards.
void apply_linear(const LinearWeights& weights, const float* x, int64_t rows, void* scratch,
                  linear::LinearOutput output, PreparedRows* kept = nullptr);

// to [rows, model_size] = norm of from, which may be `to` itself.
void apply_norm(const DecoderConfig& config, const NormWeights& weights, const float* from,
                float* to, int64_t rows);

// x [rows, model_size], in place; see LayerAttention::self().
void decoder_layer_cpu(const DecoderConfig& config, const LayerWeights& weights,
                       const LayerAttention& attention, const LayerBuffers& buffers, int64_t rows,
                       float* x);

}  // namespace lmdecode::decoder
