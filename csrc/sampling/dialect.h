// How the systems that top_k_top_p_sample can imitate differ, point by point.
// docs/reference/sampling.md has the table.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace lmdecode::sampling {

// The numbers are the op's `dialect` argument; python/lmdecode/sampling/types.py holds the names.
enum class Dialect : int64_t {
  kLmdecode = 0,
  kTransformers = 1,
  kVllm = 2,
  kAscendV1 = 3,
  kAscendV2 = 4,
  kAscendV2Probabilities = 5,  // the inputs are probabilities, filtered ones become 0
};
constexpr int64_t kDialectCount = 6;

struct DialectRules {
  bool keep_top_k_ties =
      false;  // every logit equal to the k-th value survives, not the lowest indices only
  bool high_index_first = false;  // order of equal logits within top-p
  bool strict_top_p = false;      // the prefix is full once mass > p, not once mass >= p
  bool skip_nonpositive_top_p =
      false;                          // p <= 0 switches the stage off instead of keeping one token
  bool min_p_first = false;           // min-p before top-k and top-p
  bool min_p_one_keeps_ties = false;  // min_p >= 1 keeps every logit equal to the maximum
  bool rank_noise = false;     // external noise is indexed by rank where top-k or top-p is on
  bool probabilities = false;  // logits are probabilities: no softmax, filler 0
  bool k_is_on_at_vocab_size = false;  // k == V counts as on (it matters to rank_noise only)
  bool round_to_logits = false;        // p and min-p are rounded to the dtype of the logits
  int64_t max_k = 0;                   // 0: no limit; a larger k switches the stage off
};

LMD_HOST_DEVICE DialectRules dialect_rules(Dialect dialect) {
  DialectRules rules;
  switch (dialect) {
    case Dialect::kLmdecode:
      break;
    case Dialect::kTransformers:
      rules.keep_top_k_ties = true;
      rules.high_index_first = true;
      rules.min_p_one_keeps_ties = true;
      break;
    case Dialect::kVllm:
      rules.keep_top_k_ties = true;
      rules.high_index_first = true;
      rules.min_p_first = true;
      rules.min_p_one_keeps_ties = true;
      break;
    case Dialect::kAscendV1:
      rules.strict_top_p = true;
      rules.skip_nonpositive_top_p = true;
      rules.rank_noise = true;
      rules.k_is_on_at_vocab_size = true;
      rules.round_to_logits = true;
      rules.max_k = 1024;
      break;
    case Dialect::kAscendV2Probabilities:
      rules.probabilities = true;
      [[fallthrough]];
    case Dialect::kAscendV2:
      rules.rank_noise = true;
      rules.k_is_on_at_vocab_size = true;
      rules.round_to_logits = true;
      rules.max_k = 1024;
      break;
  }
  return rules;
}

}  // namespace lmdecode::sampling
