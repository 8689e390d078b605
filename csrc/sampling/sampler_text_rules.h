// Rules that depend on the text of a row: forced tokens, sequences, n-grams, DRY. One thread runs
// it, on the CPU (sampler_text_rules.cpp) and on a GPU.
#pragma once

#include "common/exp.h"
#include "sampling/sampler_edits.h"

namespace lmdecode::sampling::text_rules {

constexpr double kMaxFloat = 0x1.fffffep127;  // the largest f32

LMD_HOST_DEVICE int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }

LMD_HOST_DEVICE bool same_tokens(const int32_t* a, const int32_t* b, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (a[i] != b[i]) return false;
  }
  return true;
}

LMD_HOST_DEVICE void add_sequence_biases(const SamplerRowView& view, const SamplerRules& rules,
                                         const SamplerPenalties& penalties,
                                         const TouchedLogits& logits) {
  const int64_t length = view.row->length;
  const auto completed = [&](const int32_t* sequence) {
    const int64_t before = sequence[0] - 1;
    return before <= length && same_tokens(sequence + 1, view.text + length - before, before);
  };
  const int32_t* sequence = rules.sequences;
  // A token may end several: its biases are summed in the order of the rules.
  for (int64_t i = 0; i < rules.sequence_count; ++i, sequence += sequence[0] + 2) {
    if (!completed(sequence)) continue;
    const int32_t token = sequence[sequence[0]];
    const int64_t at = view.find(token);
    float bias = view.biases[at];
    const int32_t* other = rules.sequences;
    for (int64_t j = 0; j < rules.sequence_count; ++j, other += other[0] + 2) {
      if (other[other[0]] != token || !completed(other) || bias == minus_infinity()) continue;
      bias = bias + float_of(static_cast<uint32_t>(other[other[0] + 1]));
    }
    logits.edited[at] =
        penalties.apply(logits.raw[at], bias, view.prompt_counts[at], view.output_counts[at]);
  }
}

LMD_HOST_DEVICE void ban_ngrams(const SamplerRowView& view, const TouchedLogits& logits) {
  const int64_t n = view.row->integers.no_repeat_ngram_size, length = view.row->length;
  if (n <= 0 || length < n) return;
  const int32_t* tail = view.text + length - (n - 1);
  for (int64_t start = 0; start + n <= length; ++start) {
    const int32_t* ngram = view.text + start;
    if (n > 1 && ngram[n - 2] != tail[n - 2]) continue;
    if (!same_tokens(ngram, tail, n - 1)) continue;
    const int64_t at = view.find(ngram[n - 1]);
    if (at >= 0) logits.edited[at] = minus_infinity();
  }
}

// suffix[j]: the longest common suffix of the text and of the text without its last j tokens.
LMD_HOST_DEVICE void common_suffixes(const int32_t* text, int64_t length, int32_t* suffix) {
  const auto at = [&](int64_t j) { return text[length - 1 - j]; };
  int64_t left = 0, right = 0;  // [left, right) is equal to the beginning, read from the end
  for (int64_t j = 1; j < length; ++j) {
    int64_t n = j < right ? smaller_of(right - j, suffix[j - left]) : 0;
    while (j + n < length && at(n) == at(j + n)) ++n;
    if (j + n > right) {
      left = j;
      right = j + n;
    }
    suffix[j] = static_cast<int32_t>(n);
  }
}

LMD_HOST_DEVICE void penalize_repeats(const SamplerRowView& view, const SamplerRules& rules,
                                      const TouchedLogits& logits) {
  const SamplerRow& row = *view.row;
  const int64_t length = row.length, allowed = row.integers.dry_allowed_length;
  if (!(row.numbers.dry_multiplier > 0.0) || !(row.numbers.dry_base >= 1.0) || length <= allowed)
    return;
  const auto is_breaker = [&](int32_t token) {
    int64_t i = 0;
    while (i < rules.breaker_count && rules.breakers[i] != token) ++i;
    return i < rules.breaker_count;
  };
  int64_t limit = 0;
  while (limit < length && !is_breaker(view.text[length - 1 - limit])) ++limit;
  if (limit < allowed) return;
  common_suffixes(view.text, length, logits.suffix);
  for (int64_t at = 0; at < row.touched; ++at) logits.repeats[at] = -1;
  for (int64_t j = 1; j < length; ++j) {
    const int64_t repeat = smaller_of(logits.suffix[j], limit);
    if (repeat < allowed || is_breaker(view.text[length - j])) continue;
    const int64_t at = view.find(view.text[length - j]);
    if (at >= 0 && logits.repeats[at] < repeat) logits.repeats[at] = static_cast<int32_t>(repeat);
  }
  for (int64_t at = 0; at < row.touched; ++at) {
    if (logits.repeats[at] < 0) continue;
    const double penalty = row.numbers.dry_multiplier *
                           integer_power(row.numbers.dry_base, logits.repeats[at] - allowed);
    logits.edited[at] =
        logits.edited[at] - static_cast<float>(penalty < kMaxFloat ? penalty : kMaxFloat);
  }
}

LMD_HOST_DEVICE int64_t forced_token(const SamplerRowView& view) {
  const SamplerRules rules = view.parsed_rules();
  for (int64_t i = 0; i < rules.forced_count; ++i) {
    if (rules.forced[2 * i] == view.row->output_length) return rules.forced[2 * i + 1];
  }
  return -1;
}

LMD_HOST_DEVICE void apply_text_rules(const SamplerRowView& view, const SamplerPenalties& penalties,
                                      const TouchedLogits& logits) {
  const SamplerRules rules = view.parsed_rules();
  const SamplerRow& row = *view.row;
  if (rules.sequence_count > 0) add_sequence_biases(view, rules, penalties, logits);
  penalize_repeats(view, rules, logits);
  ban_ngrams(view, logits);
  if (row.output_length < row.integers.min_tokens) {
    for (int64_t i = 0; i < rules.end_count; ++i) {
      logits.edited[view.find(rules.end_tokens[i])] = minus_infinity();
    }
  }
}

}  // namespace lmdecode::sampling::text_rules
