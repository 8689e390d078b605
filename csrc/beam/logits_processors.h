// The processors that log_softmax_top_k applies to the log-probabilities of a row before it chooses
// candidates: the parameters, and the rules, the same on CPU and CUDA.
//
// The order is as in transformers' generate(): bias, diversity penalty, repetition penalty,
// n-grams, minimum length, bitmask and trie, forced token, suppressed tokens. The first three
// compute, in f32; the others allow a token or give it -inf. Numbers that are no token of the
// vocabulary stand for none, wherever they are.
#pragma once

#include <cstdint>

#include "beam/token_trie.h"
#include "common/bits.h"
#include "sampling/top_k_top_p_sample.h"

namespace lmdecode::beam {

using sampling::PerRow;

// Elements of one row of a tensor.
template <class T>
struct TensorRow {
  const T* data = nullptr;
  int64_t size = 0;
  int64_t stride = 1;

  LMD_HOST_DEVICE T operator[](int64_t i) const { return data[i * stride]; }
};

// A tensor of one row for all, for each request or for each beam.
template <class T>
struct TensorRows {
  enum class Per : uint8_t { kCall, kRequest, kBeam };

  const T* data = nullptr;
  int64_t size = 0;  // of a row
  int64_t row_stride = 0;
  int64_t stride = 1;
  Per per = Per::kCall;
  const int64_t* rows = nullptr;  // of each request or beam; null: in order

  LMD_HOST_DEVICE TensorRow<T> at(int64_t request, int64_t beam) const {
    int64_t row = per == Per::kCall ? 0 : per == Per::kRequest ? request : beam;
    if (rows != nullptr) row = rows[row];
    return {data == nullptr ? nullptr : data + row * row_stride, size, stride};
  }
};

struct LogitsProcessors {
  TensorRows<int64_t> sequences;           // [rows, capacity], or null
  PerRow<int64_t> lengths;                 // [requests] valid tokens; held to [0, capacity]
  PerRow<float> repetition_penalty{1.0f};  // [requests]; 1: off
  PerRow<int64_t> no_repeat_ngram_size;    // [requests]; <= 0: off
  TensorRows<int64_t> end_tokens;          // [E] or [requests, E]
  PerRow<int64_t> min_lengths;             // [requests]
  TensorRows<int64_t> suppressed_tokens;   // [S] or [requests, S]
  TensorRows<int64_t> forced_tokens;       // [requests, 1] or [rows, 1]
  TensorRows<int64_t> diversity_tokens;    // [requests, D]
  PerRow<float> diversity_penalty;         // [requests]
  TensorRows<float> bias;                  // [vocab], [requests, vocab] or [rows, vocab]
  TensorRows<int32_t> token_bitmask;       // [requests or rows, ceil(vocab / 32)]
  // The trie that restricts the beams of a request, and the node of each.
  PerRow<TokenTrie> tries;         // [requests]; one without tokens: none
  const int32_t* nodes = nullptr;  // [rows]

  // The history that a row looks at has at most this many tokens.
  LMD_HOST_DEVICE int64_t history_length(int64_t request) const {
    if (sequences.data == nullptr) return 0;
    const int64_t length = lengths.at(request);
    return length < 0 ? 0 : length < sequences.size ? length : sequences.size;
  }
};

// The processors of one row; those that are off there are empty.
struct RowProcessors {
  TensorRow<int64_t> history;  // the tokens so far, for the two rules that look at them
  float repetition_penalty;
  int64_t ngram;  // 0: off
  TensorRow<int64_t> end_tokens;
  TensorRow<int64_t> suppressed_tokens;
  int64_t forced_token;  // -1: none
  TensorRow<int64_t> diversity_tokens;
  float diversity_penalty;
  TensorRow<float> bias;
  TensorRow<int32_t> token_bitmask;
  // Where the row is held to a trie: the tokens that it allows, ascending. Others are not looked
  // at, and it is no failure that there are none.
  bool has_trie = false;
  TensorRow<int32_t> allowed_tokens;

  // Whether any rule but a forced token may change a value.
  LMD_HOST_DEVICE bool changes_values() const {
    return has_trie || bias.data != nullptr || token_bitmask.data != nullptr || history.size > 0 ||
           end_tokens.size > 0 || suppressed_tokens.size > 0 || diversity_tokens.size > 0;
  }

  LMD_HOST_DEVICE bool penalizes_repetition() const { return repetition_penalty != 1.0f; }

  // The log-probability after the three that compute. occurrences: of the token in
  // diversity_tokens; repeated: it is in a history that is penalized.
  LMD_HOST_DEVICE float adjusted(float log_prob, int64_t token, int64_t occurrences,
                                 bool repeated) const {
    if (bias.data != nullptr) log_prob = log_prob + bias[token];
    if (occurrences > 0) log_prob = log_prob - diversity_penalty * static_cast<float>(occurrences);
    if (repeated) {
      log_prob = log_prob < 0.0f ? log_prob * repetition_penalty : log_prob / repetition_penalty;
    }
    return log_prob + 0.0f;  // never -0.0
  }

  LMD_HOST_DEVICE bool allows(int64_t token) const {
    return token_bitmask.data == nullptr ||
           (static_cast<uint32_t>(token_bitmask[token / 32]) >> (token % 32) & 1) != 0;
  }

  // The log-probability of a forced token.
  LMD_HOST_DEVICE float forced_log_prob() const {
    for (int64_t i = 0; i < suppressed_tokens.size; ++i) {
      if (suppressed_tokens[i] == forced_token) return minus_infinity();
    }
    return 0.0f;
  }

  // Does the history's n-gram that begins at `start` begin as a new one at its end would? Then its
  // last token, history[start + ngram - 1], is banned. 0 <= start <= history.size - ngram.
  LMD_HOST_DEVICE bool repeats_ngram(int64_t start) const {
    const int64_t tail = history.size - ngram + 1;
    for (int64_t i = ngram - 2; i >= 0; --i) {
      if (history[start + i] != history[tail + i]) return false;
    }
    return true;
  }
};

LMD_HOST_DEVICE RowProcessors processors_of_row(const LogitsProcessors& p, int64_t request,
                                                int64_t row, int64_t vocab) {
  RowProcessors r;
  r.history = p.sequences.at(request, row);
  r.history.size = p.history_length(request);
  const int64_t length = r.history.data == nullptr ? p.lengths.at(request) : r.history.size;
  r.repetition_penalty = p.repetition_penalty.at(request);
  r.ngram = p.no_repeat_ngram_size.at(request);
  if (r.ngram < 0 || r.ngram > r.history.size) r.ngram = 0;
  if (r.ngram == 0 && !r.penalizes_repetition()) r.history.size = 0;
  r.end_tokens = p.end_tokens.at(request, row);
  if (length >= p.min_lengths.at(request)) r.end_tokens.size = 0;
  r.suppressed_tokens = p.suppressed_tokens.at(request, row);
  r.diversity_tokens = p.diversity_tokens.at(request, row);
  r.diversity_penalty = p.diversity_penalty.at(request);
  r.bias = p.bias.at(request, row);
  r.token_bitmask = p.token_bitmask.at(request, row);
  const TokenTrie trie = p.tries.at(request);
  r.has_trie = trie.tokens != nullptr;
  if (r.has_trie) {
    const TokenTrie::Children children = trie.children(p.nodes[row]);
    r.allowed_tokens = {trie.tokens + children.begin, children.end - children.begin, 1};
  }
  r.forced_token = -1;
  if (p.forced_tokens.data != nullptr) {
    const int64_t token = p.forced_tokens.at(request, row)[0];
    if (token >= 0 && token < vocab) r.forced_token = token;
  }
  return r;
}

}  // namespace lmdecode::beam
