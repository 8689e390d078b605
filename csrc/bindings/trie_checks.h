// The tensors of a trie, and arguments of trie_step, as plain pointers.
#pragma once

#include "beam/trie_step.h"
#include "bindings/tensor_checks.h"

namespace lmdecode::beam {

// other: what tells the device.
inline void check_trie_tensor(const char* op, const char* name, const Tensor& tensor, int64_t size,
                              const char* other_name, const Tensor& other) {
  check_same_device(op, name, tensor, other_name, other);
  check_shape(op, name, tensor, size);
  check_dtype(op, name, tensor, ScalarType::Int);
  if (!tensor.is_contiguous()) fail(op, name, " has strides; expected a contiguous tensor");
}

// What the arrays hold is not looked at: a TokenTrie stays within them whatever it is.
inline TokenTrie token_trie(const char* op, const Tensor& tokens, const Tensor& child_begin,
                            const char* other_name, const Tensor& other) {
  check_rank(op, "trie_tokens", tokens, 1, "[nodes]");
  const int64_t nodes = tokens.size(0);
  if (nodes < 1) fail(op, "trie_tokens has shape [0]; expected at least one node, the root");
  check_trie_tensor(op, "trie_tokens", tokens, nodes, other_name, other);
  check_trie_tensor(op, "child_begin", child_begin, nodes + 1, other_name, other);
  return {tokens.const_data_ptr<int32_t>(), child_begin.const_data_ptr<int32_t>(), nodes};
}

// The op on one device, which `run(params, nodes)` launches, with the device selected by Guard.
template <auto run, class Guard>
Tensor trie_step(const Tensor& trie_tokens, const Tensor& child_begin, const Tensor& nodes,
                 const Tensor& tokens) {
  constexpr const char* kOp = "trie_step";
  TrieStepParams p;
  p.trie = token_trie(kOp, trie_tokens, child_begin, "nodes", nodes);
  check_rank(kOp, "nodes", nodes, 1, "[n]");
  p.size = nodes.size(0);
  check_trie_tensor(kOp, "nodes", nodes, p.size, "nodes", nodes);
  check_same_device(kOp, "tokens", tokens, "nodes", nodes);
  check_shape(kOp, "tokens", tokens, p.size);
  check_dtype(kOp, "tokens", tokens, ScalarType::Long);
  const Guard guard(nodes);
  Tensor next = new_tensor(nodes, {p.size}, ScalarType::Int);
  p.nodes = nodes.const_data_ptr<int32_t>();
  p.tokens = tokens.const_data_ptr<int64_t>();
  p.tokens_stride = tokens.stride(0);
  p.next = next.mutable_data_ptr<int32_t>();
  run(p, nodes);
  return next;
}

}  // namespace lmdecode::beam
