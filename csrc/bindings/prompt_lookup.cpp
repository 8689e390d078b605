// prompt_lookup, on CPU tensors alone.
#include "sampling/prompt_lookup.h"

#include "bindings/tensor_checks.h"

namespace lmdecode::sampling {
namespace {

constexpr const char* kOp = "prompt_lookup";

Tensor prompt_lookup(const Tensor& tokens, const Tensor& lengths, int64_t num_tokens,
                     int64_t max_ngram) {
  check_rank(kOp, "tokens", tokens, 2, "[batch, capacity]");
  check_dtype(kOp, "tokens", tokens, ScalarType::Long);
  check_shape(kOp, "lengths", lengths, tokens.size(0));
  check_dtype(kOp, "lengths", lengths, ScalarType::Long);
  check_same_device(kOp, "lengths", lengths, "tokens", tokens);
  if (num_tokens < 1 || num_tokens > (int64_t{1} << 24)) {
    fail(kOp, "num_tokens is ", num_tokens, "; expected 1 to 2^24");
  }
  if (max_ngram < 1) fail(kOp, "max_ngram is ", max_ngram, "; expected at least 1");
  if (!tokens.is_contiguous() || !lengths.is_contiguous()) {
    fail(kOp, tokens.is_contiguous() ? "lengths" : "tokens",
         " has strides; expected a contiguous tensor");
  }
  PromptLookupParams p;
  p.batch = tokens.size(0);
  p.capacity = tokens.size(1);
  p.num_tokens = num_tokens;
  p.max_ngram = max_ngram;
  p.tokens = static_cast<const int64_t*>(tokens.const_data_ptr());
  p.lengths = static_cast<const int64_t*>(lengths.const_data_ptr());
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
