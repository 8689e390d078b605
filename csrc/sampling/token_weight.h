// How the logits of a row become weights, masses and a log-probability: one rule for CPU and CUDA.
#pragma once

#include "common/exp_weight.h"
#include "common/log.h"

namespace lmdecode::sampling {

struct TokenWeight {
  float max = 0.0f;  // the largest logit of those that are weighed
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

// log(weight / kept_mass) of a kept token, -inf where one of them is 0.
LMD_HOST_DEVICE float log_probability(float weight, uint64_t kept_mass, int fraction_bits) {
  const double w = static_cast<double>(weight);
  const double mass =
      static_cast<double>(kept_mass) / static_cast<double>(uint64_t{1} << fraction_bits);
  return w > 0.0 && mass > 0.0 ? static_cast<float>(log_f64(w) - log_f64(mass)) : minus_infinity();
}

}  // namespace lmdecode::sampling
