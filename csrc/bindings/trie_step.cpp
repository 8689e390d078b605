// trie_step on either device.
#include "beam/trie_step.h"

#include "bindings/device.h"
#include "bindings/trie_checks.h"

namespace lmdecode::beam {
namespace {

Tensor trie_step(const Tensor& trie_tokens, const Tensor& child_begin, const Tensor& nodes,
                 const Tensor& tokens) {
  constexpr const char* kOp = "trie_step";
  const Arguments arguments(kOp, "nodes", nodes);
  TrieStepParams p;
  p.trie = token_trie(arguments, trie_tokens, child_begin);
  p.nodes = arguments.contiguous<const int32_t>("nodes", nodes, {-1}, "[n]");
  p.size = nodes.size(0);
  p.tokens = arguments.strided<const int64_t>("tokens", tokens, {p.size});
  p.tokens_stride = tokens.stride(0);
  const OnDevice device(nodes);
  Tensor next = new_tensor(nodes, {p.size}, ScalarType::Int);
  p.next = next.mutable_data_ptr<int32_t>();
  if constexpr (kIsCuda) {
    trie_step_cuda(p, device.stream());
  } else {
    for (int64_t i = 0; i < p.size; ++i) p.step(i);
  }
  return next;
}

}  // namespace
}  // namespace lmdecode::beam

LMD_OPS(m) { m.impl("trie_step", TORCH_BOX(&lmdecode::beam::trie_step)); }
