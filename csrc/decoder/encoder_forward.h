// The encoder of an encoder-decoder model: rows of sequences, which see all of their own sequence.
// docs/reference/decoder.md is the user's page.
//
// Sequences are concatenated without padding. A row depends on its sequence alone: the same bits
// whatever else is in the call, and on any number of threads.
#pragma once

#include "decoder/decoder_layer.h"

namespace lmdecode::decoder {

// config: vocab 0 where rows come instead of tokens; memory_size 0.
struct EncoderModel {
  DecoderConfig config;
  const float* embedding = nullptr;  // [vocab, model_size], or null
  const float* positions = nullptr;  // [num_positions, model_size], or null
  int64_t num_positions = 0;         // of the table, after position_offset
  // [1 or layers, heads, 2 * num_distances - 1], or null: by the key's place in the sequence less
  // the query's, from 1 - num_distances on.
  const float* relative_bias = nullptr;
  bool has_bias_of_layers = false;
  int64_t num_distances = 0;
  NormWeights embedding_norm;
  NormWeights final_norm;
  const LayerWeights* layers = nullptr;  // [config.layers], without cross-attention
};

struct EncoderForwardParams {
  const EncoderModel* model = nullptr;
  const int64_t* tokens = nullptr;      // [rows], or null
  const float* inputs = nullptr;        // [rows, model_size], where tokens are null
  const int64_t* positions = nullptr;   // [rows]: below num_positions
  const int64_t* row_begins = nullptr;  // [sequences + 1]: of each sequence, from 0 on
  int64_t sequences = 0;
  void* workspace = nullptr;  // encoder_workspace_bytes(), aligned to 64
  float* out = nullptr;       // [rows, model_size]
};

// Most rows of sequences computed together; a longer sequence is computed alone.
constexpr int64_t kEncoderRows = 512;

// Rows of the largest group of sequences that is computed together.
int64_t encoder_group_rows(const int64_t* row_begins, int64_t sequences);

size_t encoder_workspace_bytes(const DecoderConfig& config, int64_t group_rows);

// On torch's threads; the arguments have been checked.
void encoder_forward_cpu(const EncoderForwardParams& params);

}  // namespace lmdecode::decoder
