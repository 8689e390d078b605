// The parameters of one row with all rules of its dialect applied, for the CPU and CUDA kernels.
#pragma once

#include "common/exp_weight.h"
#include "common/half_round.h"
#include "common/log.h"
#include "sampling/top_k_top_p_sample.h"

namespace lmdecode::sampling {

enum class TopPMode : uint8_t { kOff, kOneToken, kMass };
enum class MinPMode : uint8_t { kOff, kThreshold, kMaximum, kOneToken };
enum class NoiseMode : uint8_t { kNone, kByToken, kByRank, kInternal };

struct RowParameters {
  bool greedy = false;  // temperature 0: the rest is unused
  uint8_t status = 0;   // kStatusParameter or 0
  int64_t top_k = 0;    // 0: off, else 1 <= top_k <= vocab
  TopPMode top_p_mode = TopPMode::kOff;
  MinPMode min_p_mode = MinPMode::kOff;
  NoiseMode noise = NoiseMode::kNone;
  float top_p = 1.0f;
  float min_p = 0.0f;
  double log_min_p = 0.0;  // kThreshold
  float temperature = 1.0f;
  float factor = 0.0f;     // exponent_factor(temperature)
  int fraction_bits = 43;  // mass_fraction_bits(vocab)
  int64_t seed = -1;
  int64_t position = 0;
};

// One seed for all rows stands for one each, this far apart modulo 2^63.
constexpr uint64_t kSeedStep = 0x9e3779b97f4a7c15u;

LMD_HOST_DEVICE int64_t seed_of_row(const PerRow<int64_t>& seed, int64_t row) {
  if (seed.rows != nullptr || seed.value < 0) return seed.at(row);
  const uint64_t own = static_cast<uint64_t>(seed.value) + static_cast<uint64_t>(row) * kSeedStep;
  return static_cast<int64_t>(own & 0x7fffffffffffffffu);
}

LMD_HOST_DEVICE RowParameters parameters_of_row(const TopKTopPSampleParams& params,
                                                const DialectRules& rules, int64_t row) {
  RowParameters own;
  const float temperature = params.temperature.at(row);
  float top_p = params.top_p.at(row);
  float min_p = params.min_p.at(row);
  if (rules.round_to_logits) {
    top_p = rounded_to(params.dtype, top_p);
    min_p = rounded_to(params.dtype, min_p);
  }
  const int64_t k = params.top_k.at(row);
  own.fraction_bits = mass_fraction_bits(params.vocab);
  if (!(temperature >= 0.0f) || top_p != top_p || min_p != min_p) own.status = kStatusParameter;
  // A NaN temperature counts as 0: nothing is drawn at random. NaN in top_p or min_p switches the
  // stage off.
  if (!(temperature > 0.0f)) {
    own.greedy = true;
    return own;
  }
  own.temperature = temperature;
  own.factor = exponent_factor(temperature);

  const bool in_range = k > 0 && (rules.max_k == 0 || k <= rules.max_k);
  const bool k_on =
      in_range && (rules.k_is_on_at_vocab_size ? k <= params.vocab : k < params.vocab);
  own.top_k = k_on ? k : 0;

  own.top_p = top_p;
  if (top_p <= 0.0f) {
    own.top_p_mode = rules.skip_nonpositive_top_p ? TopPMode::kOff : TopPMode::kOneToken;
  } else if (top_p < 1.0f) {
    own.top_p_mode = TopPMode::kMass;
  }

  own.min_p = min_p;
  if (min_p >= 1.0f) {
    own.min_p_mode = rules.min_p_one_keeps_ties ? MinPMode::kMaximum : MinPMode::kOneToken;
  } else if (min_p > 0.0f) {
    own.min_p_mode = MinPMode::kThreshold;
    own.log_min_p = log_f64(static_cast<double>(min_p));
  }

  if (params.q != nullptr) {
    const bool ranked = rules.rank_noise && (k_on || own.top_p_mode != TopPMode::kOff);
    own.noise = ranked ? NoiseMode::kByRank : NoiseMode::kByToken;
  } else if (params.has_seed) {
    own.seed = seed_of_row(params.seed, row);
    own.position = params.position.at(row);
    if (own.seed >= 0) own.noise = NoiseMode::kInternal;
  }
  return own;
}

// Smallest value that min-p keeps, where max is the largest of the row, after the temperature:
// exp(value - max) >= min_p in f64. The set { v : v >= result } is the same on every device.
LMD_HOST_DEVICE double min_p_bound(const RowParameters& own, float max, bool probabilities) {
  if (own.min_p_mode == MinPMode::kMaximum || own.min_p_mode == MinPMode::kOneToken)
    return static_cast<double>(max);
  if (probabilities) {
    const double bound = static_cast<double>(max) * static_cast<double>(own.min_p);
    return bound < static_cast<double>(max)
               ? bound
               : static_cast<double>(max);  // the maximum stays, be it negative
  }
  return static_cast<double>(max) + own.log_min_p;
}

// The order key of the smallest f32 value that min-p keeps.
LMD_HOST_DEVICE uint32_t min_p_key(const RowParameters& own, float max, bool probabilities) {
  const double bound = min_p_bound(own, max, probabilities);
  const float value = static_cast<float>(bound);  // nearest; the next one up where that is below
  const uint32_t key = order_key(value);
  return static_cast<double>(value) < bound ? key + 1 : key;
}

}  // namespace lmdecode::sampling
