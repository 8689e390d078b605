// Random processors of log_softmax_top_k, and what they do to one log-probability.
#pragma once

#include "beam/logits_processors.h"
#include "beam/token_trie_build.h"
#include "beam_case.h"

namespace lmdecode::beam::test {

struct ProcessorCase {
  LogitsProcessors processors;
  int64_t max_edits = 0;
  Buffer<int64_t> sequences, lengths, ngram_sizes, end_tokens, min_lengths, suppressed, forced,
      diversity;
  Buffer<float> repetition_penalties, diversity_penalties, bias;
  Buffer<int32_t> bitmask;
  Buffer<int32_t> trie_tokens, child_begin, nodes;
  Buffer<TokenTrie> tries;
};

// Some tokens often, and now and then a number that is none.
inline int64_t random_token(Random& random, int64_t vocab) {
  if (random.chance(0.05)) return random.any_of<int64_t>({-1, -7, vocab, int64_t{1} << 40});
  return random.chance(0.6) ? random.below(std::min<int64_t>(vocab, 5)) : random.below(vocab);
}

// [rows, size], as kernels read it, with strides.
template <class T, class Fill>
TensorRows<T> random_rows(Random& random, typename TensorRows<T>::Per per, int64_t rows,
                          int64_t size, Buffer<T>* buffer, Fill fill) {
  TensorRows<T> r;
  r.per = per;
  r.size = size;
  r.stride = random.chance(0.7) ? 1 : 2;
  const int64_t span = size == 0 ? 0 : (size - 1) * r.stride + 1;
  r.row_stride = span + random.below(3);
  *buffer = Buffer<T>(rows == 0 ? 0 : (rows - 1) * r.row_stride + span);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < size; ++i) (*buffer)[row * r.row_stride + i * r.stride] = fill();
  }
  r.data = buffer->data();
  return r;
}

template <class T, class Fill>
PerRow<T> random_numbers(Random& random, int64_t requests, Buffer<T>* buffer, Fill fill) {
  if (random.chance(0.4)) return {fill(), nullptr, 0};
  const int64_t stride = 1 + random.below(2);
  *buffer = Buffer<T>((requests - 1) * stride + 1);
  for (int64_t r = 0; r < requests; ++r) (*buffer)[r * stride] = fill();
  return {T{}, buffer->data(), stride};
}

inline ProcessorCase random_processors(Random& random, const LogSoftmaxTopKParams& p) {
  using Tokens = TensorRows<int64_t>;
  using Per = Tokens::Per;
  ProcessorCase c;
  LogitsProcessors& to = c.processors;
  const double often = random.any_of({0.2, 0.5, 0.9});
  const auto token = [&] { return random_token(random, p.vocab); };
  const auto tokens = [&](int64_t size, Buffer<int64_t>* buffer) {
    return random.chance(0.5)
               ? random_rows<int64_t>(random, Per::kCall, 1, size, buffer, token)
               : random_rows<int64_t>(random, Per::kRequest, p.requests, size, buffer, token);
  };
  int64_t longest = 0;
  if (random.chance(often)) {
    const int64_t capacity = random.any_of<int64_t>({0, 1, 3, 12, 60});
    to.sequences = random_rows<int64_t>(random, Per::kBeam, p.rows, capacity, &c.sequences, token);
    to.repetition_penalty = random_numbers<float>(random, p.requests, &c.repetition_penalties, [&] {
      return random.any_of({1.0f, 1.2f, 0.6f, 5.0f, 1e30f});
    });
    to.no_repeat_ngram_size = random_numbers<int64_t>(random, p.requests, &c.ngram_sizes, [&] {
      return random.any_of<int64_t>({-1, 0, 1, 2, 2, 3, 9});
    });
    longest = capacity;
  }
  to.lengths = random_numbers<int64_t>(random, p.requests, &c.lengths, [&] {
    return random.chance(0.1) ? random.any_of<int64_t>({-3, 1000}) : random.below(longest + 1);
  });
  if (random.chance(often)) {
    to.end_tokens = tokens(random.below(4), &c.end_tokens);
    to.min_lengths = random_numbers<int64_t>(random, p.requests, &c.min_lengths,
                                             [&] { return random.below(longest + 5); });
  }
  if (random.chance(often)) to.suppressed_tokens = tokens(random.below(9), &c.suppressed);
  if (random.chance(often)) {
    to.diversity_tokens = random_rows<int64_t>(random, Per::kRequest, p.requests, random.below(7),
                                               &c.diversity, token);
    to.diversity_penalty = random_numbers<float>(random, p.requests, &c.diversity_penalties, [&] {
      return random.any_of({0.0f, 0.5f, 0.3f, -1.5f, 1e38f});
    });
  }
  const auto rows_of = [&](Per per) { return per == Per::kBeam ? p.rows : p.requests; };
  if (random.chance(0.2)) {
    const Per per = random.any_of({Per::kRequest, Per::kBeam});
    to.forced_tokens = random_rows<int64_t>(random, per, rows_of(per), 1, &c.forced, [&] {
      return random.chance(0.5) ? int64_t{-1} : token();
    });
  }
  if (random.chance(often * 0.5)) {
    const int kind = static_cast<int>(random.below(3));
    const auto per = static_cast<TensorRows<float>::Per>(kind);
    const bool special = random.chance(0.2);
    to.bias = random_rows<float>(
        random, per, kind == 0 ? 1 : rows_of(static_cast<Per>(kind)), p.vocab, &c.bias, [&] {
          if (special && random.chance(0.02)) {
            const float infinity = std::numeric_limits<float>::infinity();
            return random.any_of({-infinity, -infinity, infinity, 1e38f, std::nanf("")});
          }
          return random.chance(0.3) ? 0.0f : 2.0f * static_cast<float>(random.normal());
        });
  }
  if (random.chance(often * 0.5)) {
    const int kind = 1 + static_cast<int>(random.below(2));
    const bool dense = random.chance(0.5);
    to.token_bitmask = random_rows<int32_t>(
        random, static_cast<TensorRows<int32_t>::Per>(kind), rows_of(static_cast<Per>(kind)),
        (p.vocab + 31) / 32, &c.bitmask, [&] {
          const uint32_t a = static_cast<uint32_t>(random.below(int64_t{1} << 32));
          const uint32_t b = static_cast<uint32_t>(random.below(int64_t{1} << 32));
          return static_cast<int32_t>(dense ? a | b : a & b);
        });
  }
  c.max_edits = longest + to.end_tokens.size + to.suppressed_tokens.size + to.diversity_tokens.size;
  return c;
}

// Holds most requests to a trie, or all to one, each row at some node of it, or at none.
inline void add_trie(Random& random, const LogSoftmaxTopKParams& p, ProcessorCase* c,
                     bool for_all = false) {
  const int64_t items = random.any_of<int64_t>({1, 4, 50, 3 * p.vocab});
  std::vector<int64_t> tokens, offsets{0};
  for (int64_t i = 0; i < items; ++i) {
    for (int64_t n = 1 + random.below(3); n > 0; --n) tokens.push_back(random.below(p.vocab + 2));
    offsets.push_back(static_cast<int64_t>(tokens.size()));
  }
  const TokenTrieArrays arrays = build_token_trie(tokens.data(), offsets.data(), items);
  const auto copy = [](const std::vector<int32_t>& from) {
    Buffer<int32_t> to(static_cast<int64_t>(from.size()));
    std::copy(from.begin(), from.end(), to.data());
    return to;
  };
  c->trie_tokens = copy(arrays.tokens);
  c->child_begin = copy(arrays.child_begin);
  const int64_t nodes = static_cast<int64_t>(arrays.tokens.size());
  c->tries = Buffer<TokenTrie>(p.requests);
  for (int64_t r = 0; r < p.requests; ++r) {
    c->tries[r] = {};
    if (random.chance(0.8)) c->tries[r] = {c->trie_tokens.data(), c->child_begin.data(), nodes};
  }
  c->nodes = Buffer<int32_t>(p.rows);
  for (int64_t row = 0; row < p.rows; ++row) {
    const int64_t few = random.chance(0.5) ? std::min<int64_t>(nodes, 9) : nodes;
    c->nodes[row] = random.chance(0.1) ? kOffTrie : static_cast<int32_t>(random.below(few));
  }
  c->processors.tries = {{}, c->tries.data(), 1};
  if (for_all) {
    c->processors.tries = {{c->trie_tokens.data(), c->child_begin.data(), nodes}, nullptr, 0};
  }
  c->processors.nodes = c->nodes.data();
}

// The log-probability of a token after all processors; is_nan: NaN came of those that compute.
inline float processed(const LogitsProcessors& p, int64_t request, int64_t row, int64_t vocab,
                       int64_t token, float log_prob, bool* is_nan) {
  const auto occurrences = [&](const TensorRows<int64_t>& lists) {
    int64_t count = 0;
    for (int64_t i = 0; i < lists.size; ++i) count += lists.at(request, row)[i] == token;
    return count;
  };
  const TensorRow<int64_t> history = p.sequences.at(request, row);
  int64_t length = p.lengths.at(request);
  if (history.data != nullptr) length = std::max<int64_t>(0, std::min(length, history.size));
  if (p.bias.data != nullptr) log_prob += p.bias.at(request, row)[token];
  if (const int64_t count = occurrences(p.diversity_tokens)) {
    const float loss = p.diversity_penalty.at(request) * static_cast<float>(count);
    log_prob -= loss;
  }
  bool repeated = false, banned = false;
  if (history.data != nullptr) {
    for (int64_t i = 0; i < length; ++i) repeated |= history[i] == token;
    const int64_t n = p.no_repeat_ngram_size.at(request);
    for (int64_t end = n; n > 0 && end <= length; ++end) {
      bool same = history[end - 1] == token;
      for (int64_t i = 0; i + 1 < n; ++i)
        same = same && history[end - n + i] == history[length - n + 1 + i];
      banned |= same;
    }
  }
  const float penalty = p.repetition_penalty.at(request);
  if (repeated && penalty != 1.0f) {
    log_prob = log_prob < 0.0f ? log_prob * penalty : log_prob / penalty;
  }
  *is_nan |= std::isnan(log_prob);
  if (length < p.min_lengths.at(request)) banned |= occurrences(p.end_tokens) > 0;
  if (p.token_bitmask.data != nullptr) {
    const int32_t word = p.token_bitmask.at(request, row)[token / 32];
    banned |= (word & static_cast<int32_t>(1u << (token % 32))) == 0;
  }
  if (banned) log_prob = minus_infinity();
  if (p.forced_tokens.data != nullptr) {
    const int64_t forced = p.forced_tokens.at(request, row)[0];
    if (forced >= 0 && forced < vocab) log_prob = forced == token ? 0.0f : minus_infinity();
  }
  if (occurrences(p.suppressed_tokens) > 0) log_prob = minus_infinity();
  return log_prob + 0.0f;
}

}  // namespace lmdecode::beam::test
