// One decoder layer on the rows of a step: self-attention, cross-attention, feed-forward.
#pragma once

#include "decoder/decoder_config.h"
#include "decoder/step_attention.h"

namespace lmdecode::decoder {

// Caches of one layer; shapes in step_attention.h.
struct LayerCaches {
  int64_t capacity = 0;
  float* self_keys = nullptr;
  float* self_values = nullptr;
  const int32_t* table = nullptr;
  int64_t source = 0;
  const float* cross_keys = nullptr;
  const float* cross_values = nullptr;
  const int64_t* memory_lengths = nullptr;
};

// Scratch for so many rows; each part aligned to 64.
struct LayerBuffers {
  float* normed = nullptr;   // [rows, model_size]
  float* qkv = nullptr;      // [rows, 3 * attention_size]
  float* context = nullptr;  // [rows, attention_size]
  float* ffn = nullptr;      // [rows, ffn_size]
  void* linear_input = nullptr;
};

// Deals out `memory`; with null it only counts. Returns the bytes.
size_t split_layer_buffers(const DecoderConfig& config, int64_t rows, void* memory,
                           LayerBuffers* buffers);

// y = activation(x W^T + bias) and so on, x [rows, in_features] contiguous; scratch: that of
// linear_input_bytes().
void apply_linear(const LinearWeights& weights, const float* x, int64_t rows, void* scratch,
                  linear::LinearOutput output);

// to [rows, model_size] = norm of from, which may be `to` itself.
void apply_norm(const DecoderConfig& config, const NormWeights& weights, const float* from,
                float* to, int64_t rows);

// x [rows, model_size], in place. rows: whose keys and values have been written for every earlier
// position. bias: see SelfAttentionParams.
void decoder_layer_cpu(const DecoderConfig& config, const LayerWeights& weights,
                       const StepRows& rows, const LayerCaches& caches, const float* relative_bias,
                       int64_t num_distances, const LayerBuffers& buffers, float* x);

}  // namespace lmdecode::decoder
