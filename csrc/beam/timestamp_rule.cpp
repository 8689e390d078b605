#include "beam/timestamp_rule.h"

#include <algorithm>
#include <cmath>

#include "beam/greedy_choice.h"
#include "common/bits.h"

namespace lmdecode::beam {
namespace {

AllowedTokens allowed_by_sequence(const TimestampRule& rule, const int64_t* sequence,
                                  int64_t length, int64_t vocab) {
  AllowedTokens allowed{0, rule.first, vocab};
  const auto is_timestamp = [&](int64_t place) { return sequence[place] >= rule.first; };
  const bool last = length > rule.begin && is_timestamp(length - 1);
  const bool before_last = length < rule.begin + 2 || is_timestamp(length - 2);
  const bool is_half_a_pair = last && !before_last;
  if (is_half_a_pair) allowed.text = rule.end;
  // Times do not go back, and stay where they are only between an end and the next begin.
  int64_t place = length - 1;
  while (place >= rule.begin && !is_timestamp(place)) --place;
  if (place >= rule.begin) {
    allowed.timestamps = std::min(vocab, sequence[place] + (is_half_a_pair ? 0 : 1));
  }
  if (last && before_last) allowed.timestamps_end = rule.first;
  if (length == rule.begin) {
    allowed.text = rule.first;
    if (rule.last_initial >= 0) allowed.timestamps_end = std::min(vocab, rule.last_initial + 1);
  }
  allowed.timestamps_end = std::max(allowed.timestamps_end, allowed.timestamps);
  return allowed;
}

float largest(const float* values, int64_t begin, int64_t end) {
  if (begin >= end) return minus_infinity();
  return LMD_SELECT_KERNEL(beam, largest_value)(values + begin, end - begin);
}

}  // namespace

AllowedTokens allowed_tokens(const TimestampRule& rule, const int64_t* sequence, int64_t length,
                             const float* values, int64_t vocab) {
  AllowedTokens allowed = allowed_by_sequence(rule, sequence, length, vocab);
  const float time = largest(values, allowed.timestamps, allowed.timestamps_end);
  const float text = largest(values, allowed.text, rule.first - 1);
  if (!(time > minus_infinity()) || !(text > minus_infinity())) return allowed;
  const double sum = LMD_SELECT_KERNEL(beam, sum_of_exponentials)(
      values + allowed.timestamps, allowed.timestamps_end - allowed.timestamps, time);
  if (static_cast<double>(time) + std::log(sum) > static_cast<double>(text)) {
    allowed.text = rule.first;
  }
  return allowed;
}

void keep_allowed(const TimestampRule& rule, const AllowedTokens& allowed, float* values,
                  int64_t vocab) {
  std::fill(values, values + std::min(allowed.text, rule.first), minus_infinity());
  values[rule.first - 1] = minus_infinity();
  std::fill(values + rule.first, values + allowed.timestamps, minus_infinity());
  std::fill(values + allowed.timestamps_end, values + vocab, minus_infinity());
}

void write_allowed(const TimestampRule& rule, const AllowedTokens& allowed, int32_t* bitmask,
                   int64_t vocab) {
  std::fill_n(bitmask, (vocab + 31) / 32, 0);
  const auto allow = [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const uint32_t bit = uint32_t{1} << (token % 32);
      bitmask[token / 32] = static_cast<int32_t>(static_cast<uint32_t>(bitmask[token / 32]) | bit);
      // Whole words at once.
      while (token % 32 == 31 && token + 32 < end) {
        token += 32;
        bitmask[token / 32] = -1;
      }
    }
  };
  allow(allowed.text, rule.first - 1);
  allow(allowed.timestamps, allowed.timestamps_end);
}

}  // namespace lmdecode::beam
