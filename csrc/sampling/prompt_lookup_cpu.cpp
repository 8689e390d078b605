#include <algorithm>

#include "common/parallel.h"
#include "sampling/prompt_lookup.h"

namespace lmdecode::sampling {
namespace {

constexpr int64_t kTokensOfATask = 1 << 14;

// Tokens before position `end` that are those before the end of the text, at most `most`.
int64_t common_suffix(const int64_t* text, int64_t length, int64_t end, int64_t most) {
  int64_t count = 0;
  while (count < most && count < end && text[end - 1 - count] == text[length - 1 - count]) ++count;
  return count;
}

// Start of the continuation: after the earliest match of the longest suffix; `length` if there is
// no match.
int64_t find_continuation(const int64_t* text, int64_t length, int64_t max_ngram) {
  int64_t best = 0, found = length;
  if (length == 0) return found;
  const int64_t last = text[length - 1];
  for (int64_t end = 1; end < length; ++end) {
    if (text[end - 1] != last) continue;
    const int64_t count = common_suffix(text, length, end, max_ngram);
    if (count <= best) continue;
    best = count;
    found = end;
    if (best == max_ngram) break;
  }
  return found;
}

}  // namespace

void prompt_lookup_cpu(const PromptLookupParams& p) {
  parallel_for(p.batch, 1 + kTokensOfATask / (p.capacity + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t* const text = p.tokens + row * p.capacity;
      const int64_t length = p.lengths[row];
      const int64_t from = find_continuation(text, length, p.max_ngram);
      const int64_t count = std::min(p.num_tokens, length - from);
      int64_t* const to = p.proposed + row * p.num_tokens;
      std::copy_n(text + from, count, to);
      std::fill(to + count, to + p.num_tokens, int64_t{-1});
    }
  });
}

}  // namespace lmdecode::sampling
