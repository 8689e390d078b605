// Rules on log-probabilities, or on the logits where tokens are chosen greedily, before a search
// chooses: one row for each search. The rules of python/lmdecode/beam/token_rules.py, and the
// effect of each: logits_processors.h.
#pragma once

#include <cstdint>

#include "beam/hypothesis_copies.h"
#include "beam/timestamp_rule.h"
#include "beam/token_trie.h"

namespace lmdecode::beam {

// The first three are off in all rows where they are null.
struct TokenRules {
  int64_t rows = 0;                               // n
  const float* repetition_penalty = nullptr;      // [n]; 1: off
  const int64_t* no_repeat_ngram_size = nullptr;  // [n]; 0: off
  const float* diversity_penalty = nullptr;       // [n]; for tokens of earlier groups
  // [n, num_bans, 4]: a token, the first and the last length of a sequence that it cannot be added
  // to, and whether that holds where the token is forced, too
  const int64_t* bans = nullptr;
  int64_t num_bans = 0;
  // [n, num_forced, 2]: a length (below 0: none), and the token that sequences of this length go
  // on with; the last one of a length holds
  const int64_t* forced = nullptr;
  int64_t num_forced = 0;
  // [n, 4]: the numbers of a TimestampRule; null: off. It follows the other rules, but for a forced
  // token, which it leaves alone.
  const int64_t* timestamps = nullptr;
  const float* bias = nullptr;  // [n, vocab], [vocab] for all, or null
  int64_t bias_stride = 0;      // from one row of it to the next; 0: one for all
  // The number of the trie that restricts the generated tokens, [n]; below 0: none. Null: nowhere.
  const int64_t* trie_numbers = nullptr;
  const TokenTrie* tries = nullptr;  // [num_tries]
  int64_t num_tries = 0;

  TimestampRule timestamp_rule(int64_t row) const {
    if (timestamps == nullptr) return {};
    const int64_t* const rule = timestamps + row * 4;
    return {rule[0], rule[1], rule[2], rule[3]};
  }
  // A trie without tokens if the row has none.
  LMD_HOST_DEVICE TokenTrie trie(int64_t row) const {
    const int64_t number = trie_numbers == nullptr ? -1 : trie_numbers[row];
    return number < 0 || number >= num_tries ? TokenTrie{} : tries[number];
  }

  // The token that sequences of this length go on with, or -1.
  LMD_HOST_DEVICE int64_t forced_token(int64_t row, int64_t length) const {
    int64_t token = -1;
    for (int64_t i = 0; i < num_forced; ++i) {
      const int64_t* const entry = forced + (row * num_forced + i) * 2;
      if (entry[0] == length) token = entry[1];
    }
    return token;
  }

  // Writes [num_bans] tokens that sequences of this length cannot go on with, -1 for the bans that
  // do not hold there; returns whether any of these columns does.
  LMD_HOST_DEVICE bool write_banned(int64_t row, int64_t length, bool is_forced, int64_t* banned,
                                    Columns columns) const {
    bool any = false;
    for (int64_t i = columns.first; i < num_bans; i += columns.step) {
      const int64_t* const ban = bans + (row * num_bans + i) * 4;
      const bool holds = ban[1] <= length && length <= ban[2] && (!is_forced || ban[3] != 0);
      banned[i] = holds ? ban[0] : -1;
      any |= holds;
    }
    return any;
  }
};

}  // namespace lmdecode::beam
