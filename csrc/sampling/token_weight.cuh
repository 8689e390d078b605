// What a thread computes for one token: its score by noise. The same bits as
// sampling/token_choice.h, the CPU's.
#pragma once

#include "common/token_noise.h"
#include "sampling/token_weight.h"

namespace lmdecode::sampling::cuda_kernels {

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

}  // namespace lmdecode::sampling::cuda_kernels
