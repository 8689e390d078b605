// The tensors of a trie as plain pointers.
#pragma once

#include "beam/token_trie.h"
#include "bindings/tensor_checks.h"

namespace lmdecode::beam {

// The content of the arrays is not checked: a TokenTrie stays within them in any case.
inline TokenTrie token_trie(const Arguments& arguments, const Tensor& tokens,
                            const Tensor& child_begin) {
  const auto* const trie_tokens = arguments.contiguous<const int32_t>("trie_tokens", tokens, {-1});
  const int64_t nodes = tokens.size(0);
  if (nodes < 1) {
    fail(arguments.op(), "trie_tokens has shape [0]; expected at least one node, the root");
  }
  return {trie_tokens, arguments.contiguous<const int32_t>("child_begin", child_begin, {nodes + 1}),
          nodes};
}

}  // namespace lmdecode::beam
