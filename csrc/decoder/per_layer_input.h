// An input of every layer in addition to the embedding: a row of a table, and a projection of the
// embedding. docs/reference/causal_models.md is the user's page.
//
//   inputs = table[token] * scale + norm(projection of the embedding), of each layer [size]
//   x = (x + norm(W_out (activation(W_gate x) * inputs of the layer))) * scale of the layer
#pragma once

#include "decoder/decoder_layer.h"

namespace lmdecode::decoder {

// How rows of tokens are held.
enum class EmbeddingFormat : int32_t { kLogits = 0, kFloat32 = 1, kBFloat16 = 2, kPacked = 3 };

// A row for each token.
struct TokenRows {
  EmbeddingFormat format = EmbeddingFormat::kFloat32;
  const void* values = nullptr;  // [vocab, size] of kFloat32 and kBFloat16
  linear::PackedLinear packed;   // the rows of kLogits and kPacked

  void read(int64_t token, int64_t size, float* to) const;
};

// The tables of a model.
struct PerLayerModel {
  int64_t size = 0;  // of the inputs of a layer; 0: there are none
  TokenRows rows;    // [layers * size] each
  LinearWeights projection;
  const float* norm = nullptr;  // [size]
  float scale = 1.0f;
  float norm_epsilon = 0.0f;
};

// The weights of a layer.
struct PerLayerWeights {
  LinearWeights gate;  // [size, model_size]
  LinearWeights out;   // [model_size, size]
  NormWeights out_norm;
  const float* scale = nullptr;  // [1]: last factor of x; null: 1
};

// inputs [rows, layers * size] of tokens [rows] with embeddings x [rows, model_size]; table_rows
// is scratch of that size.
void per_layer_inputs_cpu(const DecoderConfig& config, const PerLayerModel& model,
                          const int64_t* tokens, const float* x, int64_t rows, void* linear_input,
                          float* table_rows, float* inputs);

// x [rows, model_size], in place, after the feed-forward layer. inputs: where the layer's begin,
// [rows, input_stride]; null: only the scale.
void add_per_layer_input_cpu(const DecoderConfig& config, const PerLayerWeights& weights,
                             const LayerBuffers& buffers, const float* inputs, int64_t input_stride,
                             int64_t rows, float* x);

}  // namespace lmdecode::decoder
