// The next token of a row without beams: the largest logit after the processors, which here act on
// logits, as transformers has it without beams, not on log-probabilities.
#pragma once

#include <cstddef>
#include <cstdint>

#include "beam/logits_processors.h"
#include "beam/timestamp_rule.h"
#include "simd/kernel_levels.h"

namespace lmdecode::beam {

struct GreedyChoice {
  int64_t token = 0;      // the lowest of equal ones
  float log_prob = 0.0f;  // log_softmax of the logits, before the processors
  uint8_t status = 0;     // a kBeamStatus of log_softmax_top_k.h; the token is 0 then
};

// Inputs of the timestamp rule besides the values of a row.
struct TimestampRow {
  TimestampRule rule;
  const int64_t* sequence = nullptr;
  int64_t length = 0;
};

// Scratch for the tokens that processors edit one by one.
size_t greedy_edit_bytes(int64_t max_edits, int64_t vocab);

// logits [vocab], which the processors are applied to in place; memory: greedy_edit_bytes().
GreedyChoice choose_greedily(const RowProcessors& processors, const TimestampRow& timestamps,
                             float* logits, int64_t vocab, int64_t max_edits, void* memory);

// The tokens that the rule of timestamps, which is on, leaves of a row with beams. logits and
// values [vocab]; the processors, which act on log-probabilities, are applied to values.
void find_allowed(const RowProcessors& processors, const TimestampRow& timestamps,
                  const float* logits, float* values, int64_t vocab, int64_t max_edits,
                  void* memory, int32_t* bitmask);

// What processors and the rule of timestamps, where that is on, make of the log-probabilities of a
// row with beams. logits and scores [vocab].
void write_scores(const RowProcessors& processors, const TimestampRow& timestamps,
                  const float* logits, float* scores, int64_t vocab, int64_t max_edits,
                  void* memory);

}  // namespace lmdecode::beam

// The reductions of a row of logits that the choice needs, at every level.
LMD_DECLARE_KERNELS(beam, float largest_value(const float* values, int64_t size);
                    double sum_of_exponentials(const float* values, int64_t size, float top);
                    int64_t first_place(const float* values, int64_t size, float value);)
