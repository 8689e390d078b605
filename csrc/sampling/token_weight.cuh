// What a thread computes for one token: its weight, its mass, its noise. The same bits as
// sampling/token_choice.h, the CPU's.
#pragma once

#include "common/token_noise.h"
#include "sampling/kept_set.h"
#include "sampling/row_plan.h"

namespace lmdecode::sampling_cuda {

struct TokenWeight {
  float max = 0.0f;  // the largest logit that top-k leaves
  float factor = 0.0f;
  int fraction_bits = 43;
  bool uniform = false;        // the support is infinite: every weight is 1
  bool probabilities = false;  // the logits are the weights

  LMD_HOST_DEVICE float weight(float logit) const {
    if (uniform) return 1.0f;
    if (probabilities) return logit > 0.0f ? logit : 0.0f;
    return token_weight(logit, max, factor);
  }

  LMD_HOST_DEVICE uint64_t mass(float logit) const {
    if (uniform) return uint64_t{1} << fraction_bits;
    if (probabilities) return probability_mass(logit, fraction_bits);
    return token_mass(logit, max, factor, fraction_bits);
  }
};

// weight / (|q| + eps), -1 where that is 0 / 0 or q is NaN.
LMD_HOST_DEVICE float external_score(float weight, float q, float eps) {
  const float score = weight / (float_of(bits_of(q) & 0x7fffffffu) + eps);
  return score != score ? -1.0f : score;
}

// The noise e of a uniform v lies in [v, v / (1 - v)], so the high word of the noise alone bounds a
// score from both sides; few tokens need more.
LMD_HOST_DEVICE float upper_score(float weight, uint32_t high_word) {
  const float v = static_cast<float>(high_word) * 0x1p-32f;
  return weight * (1.0f + 0x1p-18f) / v;  // v = 0: +inf
}

LMD_HOST_DEVICE float lower_score(float weight, uint32_t high_word) {
  const float v = (static_cast<float>(high_word) + 1.0f) * 0x1p-32f * (1.0f + 0x1p-18f);
  const float score = weight * (1.0f - v) * (1.0f - 0x1p-18f) / v;
  return score < 0x1p126f ? score : 0x1p126f;  // an overflow is no bound
}

LMD_HOST_DEVICE double exact_score(float weight, int64_t seed, int64_t position, uint32_t token) {
  return static_cast<double>(weight) / token_noise(seed, position, token);
}

}  // namespace lmdecode::sampling_cuda
