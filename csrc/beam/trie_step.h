// trie_step: the nodes of a trie that tokens lead to. docs/reference/trie.md is the user's page.
#pragma once

#include <cstdint>

#include "beam/token_trie.h"

namespace lmdecode::beam {

struct TrieStepParams {
  TokenTrie trie;
  int64_t size = 0;
  const int32_t* nodes = nullptr;   // [size] contiguous
  const int64_t* tokens = nullptr;  // [size]
  int64_t tokens_stride = 1;        // in elements
  int32_t* next = nullptr;          // [size] contiguous; kOffTrie if there is none

  LMD_HOST_DEVICE void step(int64_t i) const {
    next[i] = trie.child(nodes[i], tokens[i * tokens_stride]);
  }
};

// stream is a cudaStream_t; launches only.
void trie_step_cuda(const TrieStepParams& params, void* stream);

}  // namespace lmdecode::beam
