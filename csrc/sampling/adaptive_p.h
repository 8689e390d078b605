// Adaptive-p (llama.cpp's): draws tokens of a probability near a target, and adjusts the target so
// that drawn tokens have it on average. The last step before the draw: it drops no token, and
// replaces the logits of those kept.
#pragma once

#include "common/host_device.h"

namespace lmdecode::sampling {

// The new logit of a token of probability p: parabolic near the target, linear far from it.
LMD_HOST_DEVICE float adapted_logit(float p, float target) {
  constexpr float kPeak = 5.0f, kSharpness = 10.0f, kPerWidth = 1.0f / 0.3f;
  const float offset = (p - target) * kPerWidth;
  const float distance = offset < 0.0f ? -offset : offset;
  return kPeak - kSharpness * distance * distance / (1.0f + distance);
}

// The target of a row, from the mean probability of its drawn tokens; 0 if that is NaN.
LMD_HOST_DEVICE float adapted_target(double target, double mean) {
  const double t = target > 0.0 ? target : 0.0;
  const double adapted = 2.0 * t - mean;
  return static_cast<float>(adapted > 1.0 ? 1.0 : adapted > 0.0 ? adapted : 0.0);
}

// The mean with one more token, of probability p; an f32 value.
LMD_HOST_DEVICE double adapted_mean(double mean, float p, double decay) {
  return static_cast<double>(
      static_cast<float>(mean + (1.0 - decay) * (static_cast<double>(p) - mean)));
}

}  // namespace lmdecode::sampling
