// What layers whose heads have a matrix each have in common: the gated delta rule, and Mamba-2.
#pragma once

#include "decoder/layer_state.h"

namespace lmdecode::decoder {

struct HeadStatesParams {
  MixerConfig config;
  StateSegments state;    // of a state what is behind convolution_state()
  float* rows = nullptr;  // [rows, config.projected()], so far apart
  int64_t row_stride = 0;
  float* gates = nullptr;  // [rows, gate_stride()] of the layer's kind
  float* out = nullptr;    // [rows, config.mixed()], so far apart
  int64_t out_stride = 0;
  const float* gamma = nullptr;  // of the norm of out
  float norm_epsilon = 0.0f;
};

constexpr int64_t kStateColumns = 32;  // of a matrix that a task has

}  // namespace lmdecode::decoder
