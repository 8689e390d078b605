// Per-token arithmetic of a thread: the score by noise, with the same bits as
// sampling/token_choice.h on the CPU, and the bin of masses.
#pragma once

#include "common/cuda_intrinsics.cuh"
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
__device__ __forceinline__ float upper_score(float weight, uint32_t high_word) {
  const float v = static_cast<float>(high_word) * 0x1p-32f;
  return cuda::divide_approximate(weight * (1.0f + 0x1p-18f), v);  // v = 0: +inf
}

__device__ __forceinline__ float lower_score(float weight, uint32_t high_word) {
  const float v = (static_cast<float>(high_word) + 1.0f) * 0x1p-32f * (1.0f + 0x1p-18f);
  const float score = cuda::divide_approximate(weight * (1.0f - v) * (1.0f - 0x1p-18f), v);
  return score < 0x1p126f ? score : 0x1p126f;  // an overflow would not be a bound
}

LMD_HOST_DEVICE double exact_score(float weight, int64_t seed, int64_t position, uint32_t token) {
  return static_cast<double>(weight) / token_noise(seed, position, token);
}

// ---- bins of masses

// Masses in bins of 1/32 octave, so that a bin knows how large its masses are: each is a number of
// 26 bits, shifted by the bin. So a bin sums up in two words of 32 bits without a carry, of
// kMostBinned tokens or less.
constexpr int kBinsOfOctave = 32;
constexpr int64_t kMostBinned = int64_t{1} << 17;
constexpr uint32_t kLowAmountBits = 15;

struct BinnedMass {
  uint32_t bin;     // does not fall where the logit grows
  uint32_t amount;  // the mass is amount << mass_shift(bin)
};

// Bin b holds exponents of two in [(b - 16.5) / 32, (b - 15.5) / 32]; at the lower end of this a
// float has the last one of its bits at 2^mass_shift(b), or below 1.
LMD_HOST_DEVICE int mass_shift(uint32_t bin) {
  const int octave = (2 * static_cast<int>(bin) - 33) >> 6;
  return octave > 23 ? octave - 23 : 0;
}

constexpr int kFirstBin = kBinsOfOctave / 2;  // of masses of 1 and a little more

LMD_HOST_DEVICE uint32_t bin_at(int place) { return place > 0 ? static_cast<uint32_t>(place) : 0; }

// The probability and bin of a logit, if the logits are the weights.
LMD_HOST_DEVICE float probability_of_bin(const TokenWeight& weight, float logit, uint32_t* bin) {
  const float one = float_of(static_cast<uint32_t>(127 + weight.fraction_bits) << 23);
  const float mass = (logit > 0.0f ? (logit < 1.0f ? logit : 1.0f) : 0.0f) * one;
  *bin = bin_at(static_cast<int>(bits_of(mass) >> 18) - 127 * kBinsOfOctave + kFirstBin);
  return mass;
}
LMD_HOST_DEVICE BinnedMass binned_probability(const TokenWeight& weight, float logit) {
  uint32_t bin;
  const float mass = probability_of_bin(weight, logit, &bin);
  const float unit = float_of(static_cast<uint32_t>(127 - mass_shift(bin)) << 23);
  return {bin, static_cast<uint32_t>(mass * unit)};
}

// Likewise, if they are neither the weights nor uniform.
LMD_HOST_DEVICE float exponent_of_bin(const TokenWeight& weight, float logit, uint32_t* bin) {
  const float exponent = weight_exponent(logit, weight.max, weight.factor);
  constexpr float kRoundToBin = kRoundMagic / kBinsOfOctave;
  *bin = bin_at(static_cast<int>(bits_of(exponent + kRoundToBin) - bits_of(kRoundToBin)) +
                kBinsOfOctave * weight.fraction_bits + kFirstBin);
  return exponent;
}
LMD_HOST_DEVICE BinnedMass binned_weight(const TokenWeight& weight, float logit) {
  uint32_t bin;
  const float exponent = exponent_of_bin(weight, logit, &bin);
  return {bin,
          static_cast<uint32_t>(scaled_exp2(exponent, weight.fraction_bits - mass_shift(bin)))};
}

// The bin alone, of any number: one that is not weighed may share its bin with some that are.
LMD_HOST_DEVICE uint32_t mass_bin(const TokenWeight& weight, float logit) {
  uint32_t bin;
  if (weight.probabilities) {
    probability_of_bin(weight, logit, &bin);
  } else {
    exponent_of_bin(weight, logit, &bin);
  }
  return bin;
}

}  // namespace lmdecode::sampling::cuda_kernels
