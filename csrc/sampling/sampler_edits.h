// Applies penalties and rules to the logits of touched tokens.
#pragma once

#include "common/bits.h"
#include "sampling/sampler_dialect.h"
#include "sampling/sampler_state.h"

namespace lmdecode::sampling {

struct SamplerPenalties {
  float repetition, presence, frequency;
  bool counts_see_prompt;

  // x: the model's logit; bias: of all rules; prompt, output: counts of the token in each.
  LMD_HOST_DEVICE float apply(float x, float bias, uint32_t prompt, uint32_t output) const {
    float y = bias == minus_infinity() ? bias : x + bias;
    if (repetition != 1.0f && prompt + output > 0) y = y < 0.0f ? y * repetition : y / repetition;
    const uint32_t counted = counts_see_prompt ? prompt + output : output;
    if (counted > 0) y = (y - frequency * static_cast<float>(counted)) - presence;
    return y;
  }
};

LMD_HOST_DEVICE SamplerPenalties sampler_penalties(const SamplerRow& row,
                                                   const SamplerDialectRules& rules) {
  return {static_cast<float>(row.numbers.repetition_penalty),
          static_cast<float>(row.numbers.presence_penalty),
          static_cast<float>(row.numbers.frequency_penalty), rules.counts_see_prompt};
}

// The logits of the touched tokens, and scratch; arrays of touched_capacity elements and 16 more.
struct TouchedLogits {
  float* raw;        // the model's
  float* edited;     // after penalties and rules
  int32_t* repeats;  // scratch
  int32_t* suffix;   // [text_capacity] scratch
};

// The token that the rules force next; -1: none.
int64_t forced_token(const SamplerRowView& view);

// Applies the rules that depend on the text: sequences, n-grams, DRY, and the ban of end tokens.
// Changes `edited`, to which all others have been applied.
void apply_text_rules(const SamplerRowView& view, const SamplerPenalties& penalties,
                      const TouchedLogits& logits);

}  // namespace lmdecode::sampling
