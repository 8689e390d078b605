#include "beam/greedy_choice.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "beam/log_softmax_top_k.h"
#include "beam/processor_edits.h"

namespace lmdecode::beam {

size_t greedy_edit_bytes(int64_t max_edits, int64_t vocab) {
  return TokenEdits::bytes(max_edits, vocab);
}

namespace {

// Bans all tokens but those that the trie allows.
void keep_trie_tokens(const RowProcessors& processors, float* values, int64_t vocab) {
  float* from = values;
  for (int64_t i = 0; i < processors.allowed_tokens.size; ++i) {
    const int64_t token = processors.allowed_tokens[i];
    if (token < 0 || token >= vocab) continue;
    from = std::fill_n(from, std::max(values + token - from, std::ptrdiff_t{0}), minus_infinity());
    from = values + token + 1;
  }
  std::fill(from, values + vocab, minus_infinity());
}

void apply(const RowProcessors& processors, float* logits, int64_t vocab, int64_t max_edits,
           void* memory) {
  RowProcessors rest = processors;
  if (processors.bias.data != nullptr) {
    for (int64_t token = 0; token < vocab; ++token) logits[token] += processors.bias[token];
    rest.bias.data = nullptr;
  }
  TokenEdits edits(memory, max_edits, vocab);
  edits.collect(rest);
  for (int64_t i = 0; i < edits.size(); ++i) {
    const TokenEdit& edit = edits[i];
    float& logit = logits[edit.token];
    logit = rest.adjusted(logit, edit.token, edit.occurrences, edit.repeated);
    if (edit.banned) logit = minus_infinity();
  }
  if (processors.has_trie) keep_trie_tokens(processors, logits, vocab);
}

double log_sum_of(const float* logits, int64_t vocab, float top) {
  return static_cast<double>(top) +
         std::log(LMD_SELECT_KERNEL(beam, sum_of_exponentials)(logits, vocab, top));
}

void write_log_probs(const float* logits, float* values, int64_t vocab) {
  const double log_sum =
      log_sum_of(logits, vocab, LMD_SELECT_KERNEL(beam, largest_value)(logits, vocab));
  for (int64_t token = 0; token < vocab; ++token) {
    values[token] = static_cast<float>(static_cast<double>(logits[token]) - log_sum);
  }
}

void force(const RowProcessors& processors, float* values, int64_t vocab) {
  std::fill_n(values, vocab, minus_infinity());
  values[processors.forced_token] = processors.forced_log_prob();
}

AllowedTokens allowed(const TimestampRow& row, const float* values, int64_t vocab) {
  return allowed_tokens(row.rule, row.sequence, row.length, values, vocab);
}

}  // namespace

GreedyChoice choose_greedily(const RowProcessors& processors, const TimestampRow& timestamps,
                             float* logits, int64_t vocab, int64_t max_edits, void* memory) {
  const auto largest = LMD_SELECT_KERNEL(beam, largest_value);
  GreedyChoice choice;
  const float top = largest(logits, vocab);
  if (std::isnan(top)) {
    choice.status = kBeamStatusNan;
    return choice;
  }
  const double log_sum = log_sum_of(logits, vocab, top);
  const auto log_prob = [&](float logit) {
    return static_cast<float>(static_cast<double>(logit) - log_sum);
  };
  if (processors.forced_token >= 0) {
    const float forced = log_prob(logits[processors.forced_token]);
    force(processors, logits, vocab);
    if (processors.forced_log_prob() < 0.0f) {
      choice.status = kBeamStatusEmpty;
      return choice;
    }
    choice.token = processors.forced_token;
    choice.log_prob = forced;
    return choice;
  }
  // Only rules that change logits need another pass.
  const bool changes = processors.changes_values();
  if (changes) apply(processors, logits, vocab, max_edits, memory);
  if (timestamps.rule.is_on()) {
    keep_allowed(timestamps.rule, allowed(timestamps, logits, vocab), logits, vocab);
  }
  const float best = changes || timestamps.rule.is_on() ? largest(logits, vocab) : top;
  if (std::isnan(best) || !(best > minus_infinity())) {
    choice.status = std::isnan(best) ? kBeamStatusNan : kBeamStatusEmpty;
    return choice;
  }
  choice.token = LMD_SELECT_KERNEL(beam, first_place)(logits, vocab, best);
  choice.log_prob = log_prob(logits[choice.token]);
  return choice;
}

void find_allowed(const RowProcessors& processors, const TimestampRow& timestamps,
                  const float* logits, float* values, int64_t vocab, int64_t max_edits,
                  void* memory, int32_t* bitmask) {
  const float* ruled = logits;
  if (processors.changes_values()) {
    write_log_probs(logits, values, vocab);
    apply(processors, values, vocab, max_edits, memory);
    ruled = values;
  }
  write_allowed(timestamps.rule, allowed(timestamps, ruled, vocab), bitmask, vocab);
}

void write_scores(const RowProcessors& processors, const TimestampRow& timestamps,
                  const float* logits, float* scores, int64_t vocab, int64_t max_edits,
                  void* memory) {
  write_log_probs(logits, scores, vocab);
  if (processors.forced_token >= 0) return force(processors, scores, vocab);
  if (processors.changes_values()) apply(processors, scores, vocab, max_edits, memory);
  if (timestamps.rule.is_on()) {
    keep_allowed(timestamps.rule, allowed(timestamps, scores, vocab), scores, vocab);
  }
}

}  // namespace lmdecode::beam
