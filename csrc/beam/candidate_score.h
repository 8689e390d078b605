// The score of a candidate: one fixed sequence of operations, the same on CPU and CUDA.
#pragma once

#include "beam/log_softmax_top_k.h"
#include "common/exp_weight.h"
#include "common/log.h"

namespace lmdecode::beam {

// The part of a row's state that its beam score decides.
LMD_HOST_DEVICE uint8_t beam_score_status(float beam_score) {
  return beam_score < plus_infinity() ? 0 : kBeamStatusScore;
}
LMD_HOST_DEVICE bool is_alive(float beam_score) { return beam_score > minus_infinity(); }

// The lowest logit that can be a candidate.
LMD_HOST_DEVICE float lowest_candidate() { return value_of_key(kMinusInfinityKey + 1); }

// The lowest value whose score has at least this order key; NaN, which no comparison reaches, where
// the row's largest, score.top(), does not. Scores never fall as the value rises.
template <class Score>
LMD_HOST_DEVICE float lowest_value(const Score& score, uint32_t score_key) {
  uint32_t low = kMinusInfinityKey, high = order_key(score.top());
  if (order_key(score(value_of_key(high))) < score_key) return float_of(0x7fc00000u);
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    const bool reached = order_key(score(value_of_key(middle))) >= score_key;
    high = reached ? middle : high;
    low = reached ? low : middle;
  }
  return value_of_key(high);
}

// Scores of a row: f32(logit - max - log(sum of exp(logit - max))) in f64, then + beam_score in
// f32. They never fall as the logit rises, but different logits may have one score. A row with
// logits of +inf shares the probability evenly among these.
struct CandidateScore {
  double max;
  double log_sum;
  float beam_score;
  bool infinite;

  // total: the sum of the masses of the row, relative to max; where max is +inf, the number of
  // these logits.
  LMD_HOST_DEVICE static CandidateScore of_row(float max, uint64_t total, int fraction_bits,
                                               float beam_score) {
    const bool infinite = max == plus_infinity();
    const double unit = double_of(static_cast<uint64_t>(1023 - (infinite ? 0 : fraction_bits))
                                  << 52);  // 2^-fraction_bits
    return {static_cast<double>(max), log_f64(static_cast<double>(total) * unit), beam_score,
            infinite};
  }

  LMD_HOST_DEVICE float log_prob(float logit) const {
    double difference = static_cast<double>(logit) - max;
    if (infinite) {
      difference = logit == plus_infinity() ? 0.0 : static_cast<double>(minus_infinity());
    }
    return static_cast<float>(difference - log_sum) + 0.0f;  // never -0.0
  }

  LMD_HOST_DEVICE float operator()(float logit) const {
    return (log_prob(logit) + beam_score) + 0.0f;
  }

  LMD_HOST_DEVICE float top() const { return static_cast<float>(max); }
};

// Scores of a row of log-probabilities that processors have changed.
struct ProcessedScore {
  float max;  // the largest log-probability
  float beam_score;

  LMD_HOST_DEVICE float log_prob(float value) const { return value; }
  LMD_HOST_DEVICE float operator()(float value) const { return (value + beam_score) + 0.0f; }
  LMD_HOST_DEVICE float top() const { return max; }
};

}  // namespace lmdecode::beam
