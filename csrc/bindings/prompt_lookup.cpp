// prompt_lookup, on CPU tensors alone.
#include "sampling/prompt_lookup.h"

#include "bindings/tensor_checks.h"

namespace lmdecode::sampling {
namespace {

constexpr const char* kOp = "prompt_lookup";

Tensor prompt_lookup(const Tensor& tokens, const Tensor& lengths, int64_t num_tokens,
                     int64_t max_ngram) {
  const Arguments arguments(kOp);
  PromptLookupParams p;
  check_rank(kOp, "tokens", tokens, 2, "[batch, capacity]");
  p.tokens = arguments.contiguous<const int64_t>("tokens", tokens, {-1, -1});
  p.lengths = arguments.contiguous<const int64_t>("lengths", lengths, {tokens.size(0)});
  if (num_tokens < 1 || num_tokens > (int64_t{1} << 24)) {
    fail(kOp, "num_tokens is ", num_tokens, "; expected 1 to 2^24");
  }
  if (max_ngram < 1) fail(kOp, "max_ngram is ", max_ngram, "; expected at least 1");
  p.batch = tokens.size(0);
  p.capacity = tokens.size(1);
  p.num_tokens = num_tokens;
  p.max_ngram = max_ngram;
  for (int64_t row = 0; row < p.batch; ++row) {
    if (p.lengths[row] >= 0 && p.lengths[row] <= p.capacity) continue;
    fail(kOp, "lengths[", row, "] is ", p.lengths[row], "; expected 0 to ", p.capacity);
  }
  Tensor proposed = new_tensor(tokens, {p.batch, num_tokens}, ScalarType::Long);
  p.proposed = static_cast<int64_t*>(proposed.mutable_data_ptr());
  prompt_lookup_cpu(p);
  return proposed;
}

}  // namespace
}  // namespace lmdecode::sampling

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("prompt_lookup", TORCH_BOX(&lmdecode::sampling::prompt_lookup));
}
