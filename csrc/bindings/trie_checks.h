// The tensors of a trie as plain pointers.
#pragma once

#include "beam/token_trie.h"
#include "bindings/tensor_checks.h"

namespace lmdecode::beam {

inline void check_trie_tensor(const char* op, const char* name, const Tensor& tensor,
                              int64_t size) {
  check_shape(op, name, tensor, size);
  check_dtype(op, name, tensor, ScalarType::Int);
  if (!tensor.is_cpu()) fail(op, name, " is on ", device_name(tensor), "; expected cpu");
  if (!tensor.is_contiguous()) fail(op, name, " has strides; expected a contiguous tensor");
}

// What the arrays hold is not looked at: a TokenTrie stays within them whatever it is.
inline TokenTrie token_trie(const char* op, const Tensor& tokens, const Tensor& child_begin) {
  check_rank(op, "trie_tokens", tokens, 1, "[nodes]");
  const int64_t nodes = tokens.size(0);
  if (nodes < 1) fail(op, "trie_tokens has shape [0]; expected at least one node, the root");
  check_trie_tensor(op, "trie_tokens", tokens, nodes);
  check_trie_tensor(op, "child_begin", child_begin, nodes + 1);
  return {tokens.const_data_ptr<int32_t>(), child_begin.const_data_ptr<int32_t>(), nodes};
}

}  // namespace lmdecode::beam
