// Adaptive-p (llama.cpp's): tokens whose probability is near a target are drawn, and the target
// moves against what was drawn, so that on average the drawn ones have it. The last thing before
// the draw: it drops no token, it gives those that are kept other logits.
#pragma once

#include "common/host_device.h"

namespace lmdecode::sampling {

// Of a token of probability p: near the target as a parabola, far from it as a line.
LMD_HOST_DEVICE float adapted_logit(float p, float target) {
  constexpr float kPeak = 5.0f, kSharpness = 10.0f, kPerWidth = 1.0f / 0.3f;
  const float offset = (p - target) * kPerWidth;
  const float distance = offset < 0.0f ? -offset : offset;
  return kPeak - kSharpness * distance * distance / (1.0f + distance);
}

// The target of a row whose drawn tokens have this mean probability.
LMD_HOST_DEVICE float adapted_target(double target, double mean) {
  const double t = target > 0.0 ? target : 0.0;
  const double adapted = 2.0 * t - mean;
  return static_cast<float>(adapted < 0.0 ? 0.0 : adapted > 1.0 ? 1.0 : adapted);
}

// The mean with one more token, of probability p; an f32 value.
LMD_HOST_DEVICE double adapted_mean(double mean, float p, double decay) {
  return static_cast<double>(
      static_cast<float>(mean + (1.0 - decay) * (static_cast<double>(p) - mean)));
}

}  // namespace lmdecode::sampling
