// A causal convolution of each feature over the last tokens, whose last inputs are a state.
//
//   gated: u = B x, out = C convolution(u), where a row is B, C and x, [channels] each
//   else:  u = row, row = silu(convolution(u)), in place
//
// Taps are added from the oldest token on, so a channel's bits do not depend on how rows are cut.
#pragma once

#include "decoder/layer_state.h"
#include "simd/kernel_levels.h"

namespace lmdecode::decoder {

struct ShortConvolutionParams {
  StateSegments state;  // of a state the first [taps - 1, channels], the oldest first
  int64_t channels = 0;
  int64_t taps = 0;
  const float* kernel = nullptr;  // [taps, channels]
  const float* bias = nullptr;    // [channels] or null
  float* rows = nullptr;          // [rows, row_stride]
  int64_t row_stride = 0;
  float* out = nullptr;  // [rows, channels] where it is gated; else null
};

// Channels that a thread takes at a time, at least.
constexpr int64_t kConvolutionChannels = 64;

}  // namespace lmdecode::decoder

// Of the channels of [begin, end) all segments.
LMD_DECLARE_KERNELS(decoder, void short_convolution(const ShortConvolutionParams& params,
                                                    int64_t begin, int64_t end);)
