// The arithmetic of a Sampler's stages, the same for CPU and CUDA: the terms of one token, and the
// bounds from the sums over the remaining tokens. docs/reference/sampler.md has the formulas.
#pragma once

#include "common/exp.h"
#include "common/mass_threshold.h"
#include "common/token_noise.h"
#include "common/wide.h"
#include "sampling/adaptive_p.h"
#include "sampling/sampler_state.h"
#include "sampling/token_weight.h"

namespace lmdecode::sampling {

constexpr double kLn2 = 0.69314718055994530942;

LMD_HOST_DEVICE double square_root(double x) {
#if defined(__CUDA_ARCH__)
  return __dsqrt_rn(x);
#else
  return __builtin_sqrt(x);
#endif
}

// ---- weights

// The weights of the tokens that are left.
struct RowWeights {
  uint64_t mass;      // of all, the weight 1 being 2^fraction_bits
  uint64_t surprise;  // sum of weight * exponent, likewise: the exponent is -log2(weight)
  double sum;         // of the weights
  double log_sum;
  double mean_exponent;
  LMD_HOST_DEVICE double entropy() const { return log_sum + kLn2 * mean_exponent; }  // nats
};

LMD_HOST_DEVICE double mass_unit(int fraction_bits) {
  return static_cast<double>(uint64_t{1} << fraction_bits);
}

LMD_HOST_DEVICE RowWeights row_weights(uint64_t mass, uint64_t surprise, int fraction_bits) {
  RowWeights w{};
  w.mass = mass;
  w.surprise = surprise;
  w.sum = static_cast<double>(mass) / mass_unit(fraction_bits);
  w.log_sum = log_f64(w.sum);
  w.mean_exponent = static_cast<double>(surprise) / static_cast<double>(mass);
  return w;
}

// floor(weight * exponent * 2^fraction_bits) of a token: probability_filters.h has it for vectors.
LMD_HOST_DEVICE uint64_t token_surprise(const TokenWeight& rule, float value) {
  if (rule.uniform) return 0;
  const float e = (value - rule.max) * rule.factor;
  const float exponent = 0.0f - (e > kMinExponent ? e : kMinExponent);
  const float scale = float_of(static_cast<uint32_t>(127 + rule.fraction_bits) << 23);
  return static_cast<uint64_t>(rule.weight(value) * exponent * scale);
}

// ---- stages that keep all from some value on

// The least log-probability, relative to the largest, that a stage keeps.
LMD_HOST_DEVICE double epsilon_offset(double epsilon, const RowWeights& w) {
  return log_f64(epsilon * w.sum);
}
LMD_HOST_DEVICE double eta_offset(double epsilon, const RowWeights& w) {
  const double log = log_f64(epsilon), other = 0.5 * log - w.entropy();
  return w.log_sum + (log < other ? log : other);
}
LMD_HOST_DEVICE double mirostat_offset(double mu, const RowWeights& w) {
  return w.log_sum - mu * kLn2;
}

// The key of the smallest value >= the largest one, max, + offset; above its own where offset > 0.
LMD_HOST_DEVICE uint32_t key_below_max(float max, double offset) {
  if (max == plus_infinity()) return kPlusInfinityKey + (offset > 0.0 ? 1 : 0);
  if (offset > 0.0) return order_key(max) + 1;
  const double bound = static_cast<double>(max) + offset;
  const float value = static_cast<float>(bound);  // nearest; the next one up where that is below
  return order_key(value) + (static_cast<double>(value) < bound ? 1 : 0);
}

// The standard deviation of `count` values. How far each is below the largest is rounded to a
// multiple of the range's 2^-21, its share; the sums of shares and of their squares are exact.
struct ShareSums {
  uint64_t sum = 0;
  Wide squares = 0;
};

// Shares of a half range > 0 in 1; finite.
LMD_HOST_DEVICE float shares_of(float half_range) {
  const float shares = 0x1p21f / half_range;
  return shares < 0x1p127f ? shares : 0x1p127f;
}

LMD_HOST_DEVICE double standard_deviation(float shares, const ShareSums& sums, int64_t count) {
  const Wide all = sums.squares * static_cast<uint64_t>(count);
  const Wide mean = static_cast<Wide>(sums.sum) * sums.sum;
  const double variance = to_double(all - mean);
  return 2.0 * square_root(variance) / (static_cast<double>(shares) * static_cast<double>(count));
}

// The share of one finite value; probability_filters.h has the vector version.
LMD_HOST_DEVICE uint32_t value_share(float value, float half_max, float shares) {
  const float below = fused_multiply_add(value, -0.5f, half_max);
  return bits_of(fused_multiply_add(below, shares, kRoundMagic)) & 0x3fffff;
}

// ---- the others

// Top-h: the part of the total entropy that tokens with these sums make up.
struct EntropyTerms {
  RowWeights w;
  double unit;
  LMD_HOST_DEVICE double operator()(uint64_t mass, uint64_t exponents) const {
    return (kLn2 * (static_cast<double>(exponents) / unit) +
            w.log_sum * (static_cast<double>(mass) / unit)) /
           w.sum;
  }
};

// Typical: how far a token's surprise is from the entropy, in logits.
struct TypicalDistance {
  bool alike;  // all tokens are as far
  double max, mean;

  LMD_HOST_DEVICE TypicalDistance(const TokenWeight& rule, const RowWeights& w) {
    const double factor = static_cast<double>(rule.factor);
    alike = rule.uniform || !(factor > 0.0);
    max = static_cast<double>(rule.max);
    mean = alike ? 0.0 : w.mean_exponent / factor;
  }

  // One rounding of f64 to f32. probability_filters.h has it for vectors.
  LMD_HOST_DEVICE float of(float value) const {
    if (alike) return 0.0f;
    const float d = static_cast<float>((static_cast<double>(value) - max) - -mean);
    return float_of(bits_of(d) & 0x7fffffffu);
  }
};

// The mass that typical keeps of this one.
LMD_HOST_DEVICE uint64_t typical_target(double p, uint64_t mass) {
  return p > 0.0 ? mass_threshold(static_cast<float>(p), mass, /*strict=*/false) : 1;
}

// XTC's chance: a function of seed and position alone, as the noise is.
LMD_HOST_DEVICE bool excludes_top_choices(const SamplerRow& row) {
  const double probability = row.numbers.xtc_probability;
  if (row.integers.seed < 0) return probability >= 1.0;
  return row_fraction(row.integers.seed, row.position, kXtcBlock) < probability;
}

// By the entropy of the `count` > 1 tokens that the temperatures so far leave.
LMD_HOST_DEVICE double dynamic_temperature(const SamplerNumbers& numbers, int64_t count,
                                           double entropy) {
  const double temperature = numbers.temperature, range = numbers.dynamic_temperature_range;
  const double low = temperature > range ? temperature - range : 0.0;
  const double share = entropy / log_f64(static_cast<double>(count));
  return low + (temperature + range - low) *
                   power_of_share(share < 1.0 ? share : 1.0, numbers.dynamic_temperature_exponent);
}

// The state of adaptive-p or mirostat after a token of this weight was drawn from tokens of this
// mass; probability: the token's before adaptive-p.
LMD_HOST_DEVICE double mu_after_draw(const SamplerRow& row, float weight, uint64_t kept_mass,
                                     int fraction_bits, float probability) {
  const SamplerNumbers& numbers = row.numbers;
  if (numbers.adaptive_target >= 0.0)
    return adapted_mean(row.mu, probability, numbers.adaptive_decay);
  if (!(numbers.mirostat_tau > 0.0)) return row.mu;
  const double kept = static_cast<double>(kept_mass) / mass_unit(fraction_bits);
  const double log = log_f64(static_cast<double>(weight)) - log_f64(kept);
  const double surprise = -log * kLog2E;
  return static_cast<double>(
      static_cast<float>(row.mu - numbers.mirostat_eta * (surprise - numbers.mirostat_tau)));
}

}  // namespace lmdecode::sampling
