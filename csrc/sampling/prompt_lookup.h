// prompt_lookup: proposes a continuation of a text: the tokens that followed its last tokens
// earlier on. docs/reference/sampling.md is the user's page.
#pragma once

#include <cstdint>

namespace lmdecode::sampling {

struct PromptLookupParams {
  int64_t batch = 0;
  int64_t capacity = 0;              // of a text
  int64_t num_tokens = 0;            // that are proposed, at most
  int64_t max_ngram = 1;             // tokens that are compared, at most
  const int64_t* tokens = nullptr;   // [batch, capacity]
  const int64_t* lengths = nullptr;  // [batch]: 0 to capacity
  int64_t* proposed = nullptr;       // [batch, num_tokens]; -1 after the proposal
};

void prompt_lookup_cpu(const PromptLookupParams& params);

}  // namespace lmdecode::sampling
