// Whisper's timestamp rules: the allowed next tokens of a row, by its generated tokens and by its
// probabilities of timestamps and of text. The rules follow transformers'
// WhisperTimeStampLogitsProcessor; python/lmdecode/reference/decoder.py has them in plain torch.
//
// The vocabulary is text, the token "no timestamps", and timestamps up to its end.
#pragma once

#include <cstdint>

namespace lmdecode::beam {

struct TimestampRule {
  int64_t first = -1;         // the first timestamp, >= 1; below 0: the rule is off
  int64_t end = 0;            // tokens below it are no ends: they cannot stand between a pair
  int64_t begin = 0;          // the length of a sequence of which nothing is generated yet
  int64_t last_initial = -1;  // the last timestamp that it may begin with; below 0: any

  bool is_on() const { return first >= 0; }
};

// The tokens that may come next: [text, first - 1) and [timestamps, timestamps_end).
struct AllowedTokens {
  int64_t text, timestamps, timestamps_end;
};

// The tokens that the rule allows after a sequence [length]. values [vocab]: the row's logits or
// log-probabilities after the processors, -inf for tokens that these ban. If all timestamps
// together are more probable than each token of text, text is banned.
AllowedTokens allowed_tokens(const TimestampRule& rule, const int64_t* sequence, int64_t length,
                             const float* values, int64_t vocab);

// -inf for all other tokens.
void keep_allowed(const TimestampRule& rule, const AllowedTokens& allowed, float* values,
                  int64_t vocab);

// Writes a bit for each token of the vocabulary, 1 if it is allowed, to ceil(vocab / 32) words.
void write_allowed(const TimestampRule& rule, const AllowedTokens& allowed, int32_t* bitmask,
                   int64_t vocab);

}  // namespace lmdecode::beam
