// Token rules and their tries to plain pointers: python/lmdecode/beam/token_rules.py describes each
// tensor.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "beam/token_rules.h"
#include "bindings/decoder_checks.h"
#include "bindings/trie_checks.h"

namespace lmdecode::decoder {

inline constexpr size_t kRuleTensors = 7;

// The tensors of tries follow the other rules': each row's number, below 0 for none, then tokens
// and child_begin of each trie. Returns the tries that `rules` then points to.
inline std::vector<beam::TokenTrie> add_tries(const Arguments& arguments, const Tensors& tensors,
                                              beam::TokenRules* rules) {
  if (tensors.size() <= kRuleTensors) return {};
  const char* const op = arguments.op();
  const int64_t* const number = arguments.contiguous<const int64_t>(
      "token_rules.trie_numbers", tensors[kRuleTensors], {rules->rows});
  const size_t first = kRuleTensors + 1, count = (tensors.size() - first) / 2;
  if ((tensors.size() - first) % 2 != 0) {
    fail(op, "token_rules has ", tensors.size(), " tensors; expected ", kRuleTensors,
         ", or with tries one more and two for each");
  }
  for (int64_t row = 0; row < rules->rows && arguments.on_cpu(); ++row) {
    check_number(op, "token_rules.trie_numbers", row, number[row], -1,
                 static_cast<int64_t>(count) - 1);
  }
  std::vector<beam::TokenTrie> tries;
  for (size_t at = first; at < tensors.size(); at += 2) {
    tries.push_back(beam::token_trie(arguments, tensors[at], tensors[at + 1]));
  }
  rules->trie_numbers = number;
  rules->tries = tries.data();
  rules->num_tries = static_cast<int64_t>(count);
  return tries;
}

// The content of the tensors is checked on the CPU only.
inline beam::TokenRules token_rules(const Arguments& arguments, const Tensors& all, int64_t rows,
                                    int64_t vocab) {
  const char* const op = arguments.op();
  const Tensors tensors(
      all.begin(), all.begin() + static_cast<std::ptrdiff_t>(std::min(all.size(), kRuleTensors)));
  TensorList list(arguments, "token_rules", tensors, kRuleTensors);
  beam::TokenRules rules;
  rules.rows = rows;
  rules.repetition_penalty = list.next_or_null<const float>("repetition_penalty", {rows});
  rules.no_repeat_ngram_size = list.next_or_null<const int64_t>("no_repeat_ngram_size", {rows});
  rules.diversity_penalty = list.next_or_null<const float>("diversity_penalty", {rows});
  check_rank(op, "token_rules.bans", tensors[3], 3, "[slots, bans, 4]");
  rules.num_bans = tensors[3].size(1);
  rules.bans = list.next<const int64_t>("bans", {rows, rules.num_bans, 4});
  check_rank(op, "token_rules.forced", tensors[4], 3, "[slots, forced tokens, 2]");
  rules.num_forced = tensors[4].size(1);
  rules.forced = list.next<const int64_t>("forced", {rows, rules.num_forced, 2});
  rules.timestamps = list.next<const int64_t>("timestamps", {rows, 4});
  // One for all, or a row each.
  if (tensors[6].dim() == 2) {
    rules.bias = list.next<const float>("bias", {rows, vocab});
    rules.bias_stride = vocab;
  } else {
    rules.bias = list.next_or_null<const float>("bias", {vocab});
  }
  for (int64_t row = 0; row < rows && arguments.on_cpu(); ++row) {
    if (rules.repetition_penalty != nullptr && !(rules.repetition_penalty[row] > 0.0f)) {
      fail(op, "token_rules.repetition_penalty[", row, "] is ", rules.repetition_penalty[row],
           "; expected a number above 0");
    }
    const beam::TimestampRule rule = rules.timestamp_rule(row);
    if (!rule.is_on()) continue;
    const bool fits = rule.first >= 1 && rule.first < vocab && rule.end >= 0 &&
                      rule.end < rule.first && rule.begin >= 0 && rule.last_initial < vocab;
    if (!fits) {
      fail(op, "token_rules.timestamps[", row, "] is ", rule.first, ", ", rule.end, ", ",
           rule.begin, ", ", rule.last_initial, "; expected the first timestamp, 1 to ", vocab - 1,
           ", an end token below it, a length, and a timestamp below ", vocab, " or -1");
    }
  }
  return rules;
}

}  // namespace lmdecode::decoder
