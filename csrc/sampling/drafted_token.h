// A drafted token that the rule of rejection looks at: one rule for CPU and CUDA.
#pragma once

#include "common/token_noise.h"
#include "common/wide.h"
#include "sampling/token_weight.h"

namespace lmdecode::sampling {

struct DraftedToken {
  int64_t token;
  const float* logits;  // [vocab] that it was drawn from by softmax; null: it was certain
  TokenWeight rule;     // of these
  uint64_t mass;        // of all tokens

  LMD_HOST_DEVICE uint64_t mass_of(int64_t other) const {
    if (logits == nullptr) return other == token ? mass : 0;
    const float logit = logits[other];
    const float least = rule.uniform ? plus_infinity() : -kMaxFloat;
    return logit >= least ? rule.mass(logit) : 0;
  }
};

// u * a < 2^64 * b
LMD_HOST_DEVICE bool is_accepted(uint64_t u, Wide a, Wide b) {
  const Wide low = static_cast<Wide>(static_cast<uint64_t>(a)) * u;
  const Wide high = (a >> 64) * u + (low >> 64);
  return high < b;
}

// The noise of the token that replaces a rejected one.
LMD_HOST_DEVICE double rejection_noise(int64_t seed, int64_t position, uint32_t token) {
  return exponential_noise(noise_word(seed, position, token, 4),
                           noise_word(seed, position, token, 5));
}

}  // namespace lmdecode::sampling
