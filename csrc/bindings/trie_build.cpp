// trie_build, on CPU tensors alone.
#include <algorithm>

#include "beam/token_trie_build.h"
#include "bindings/tensor_checks.h"

namespace lmdecode::beam {
namespace {

constexpr const char* kOp = "trie_build";

template <class T>
Tensor tensor_of(const Tensor& like, const std::vector<T>& values, ScalarType type) {
  Tensor tensor = new_tensor(like, {static_cast<int64_t>(values.size())}, type);
  std::copy(values.begin(), values.end(), static_cast<T*>(tensor.mutable_data_ptr()));
  return tensor;
}

std::tuple<Tensor, Tensor, Tensor> trie_build(const Tensor& tokens, const Tensor& offsets) {
  const Arguments arguments(kOp);
  const int64_t* const token = arguments.contiguous<const int64_t>("tokens", tokens, {-1});
  const int64_t* const offset = arguments.contiguous<const int64_t>("offsets", offsets, {-1});
  const int64_t sequences = offsets.size(0) - 1, size = tokens.size(0);
  if (sequences < 0) fail(kOp, "offsets has shape [0]; expected [sequences + 1]");
  if (sequences >= (int64_t{1} << 32)) {
    fail(kOp, "offsets has ", sequences, " sequences; expected fewer than 2^32");
  }
  if (offset[0] != 0 || offset[sequences] != size) {
    fail(kOp, "offsets go from ", offset[0], " to ", offset[sequences], "; expected 0 to ", size,
         ", the number of tokens");
  }
  // All offsets before a token is read by one.
  for (int64_t i = 0; i < sequences; ++i) {
    if (offset[i + 1] == offset[i]) {
      fail(kOp, "sequence ", i, " is empty; expected at least one token");
    }
    if (offset[i + 1] < offset[i] || offset[i + 1] > size) {
      fail(kOp, "offsets[", i + 1, "] is ", offset[i + 1], "; expected ", offset[i] + 1, " to ",
           size);
    }
  }
  const int64_t* const bad =
      std::find_if(token, token + size, [](int64_t t) { return t < 0 || t > INT32_MAX; });
  if (bad != token + size) {
    const int64_t at = bad - token;
    const int64_t sequence = std::upper_bound(offset, offset + sequences, at) - offset - 1;
    fail(kOp, "token ", at - offset[sequence], " of sequence ", sequence, " is ", *bad,
         "; expected 0 to 2^31 - 1");
  }
  const TokenTrieArrays trie = build_token_trie(token, offset, sequences);
  return {tensor_of(tokens, trie.tokens, ScalarType::Int),
          tensor_of(tokens, trie.child_begin, ScalarType::Int),
          tensor_of(tokens, trie.ends, ScalarType::Byte)};
}

}  // namespace
}  // namespace lmdecode::beam

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("trie_build", TORCH_BOX(&lmdecode::beam::trie_build));
}
