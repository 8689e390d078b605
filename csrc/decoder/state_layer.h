// Layers with a state: the mixer that replaces attention, on the rows of a step.
#pragma once

#include "decoder/layer_state.h"

namespace lmdecode::decoder {

struct StateLayerParams {
  MixerConfig config;
  MixerWeights weights;
  StateSegments state;  // of the layer
  float norm_epsilon = 0.0f;
  float* rows = nullptr;  // [num_rows, config.projected()], row_stride apart; overwritten
  int64_t row_stride = 0;
  int64_t num_rows = 0;
  float* gates = nullptr;  // [num_rows, state_layer_gates()] scratch
  float* out = nullptr;    // [num_rows, config.mixed()], out_stride apart
  int64_t out_stride = 0;  // both strides are the sizes of rows, unless the mixer is of Mamba-2
};

// Floats of scratch for each row.
inline int64_t state_layer_gates(const MixerConfig& config) {
  return 2 * config.value_heads + config.key_heads;
}

// On torch's threads. Each row is in one segment.
void state_layer_cpu(const StateLayerParams& params);

}  // namespace lmdecode::decoder
