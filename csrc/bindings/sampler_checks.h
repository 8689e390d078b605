// The rows of a Sampler as they come to its ops.
#pragma once

#include "bindings/tensor_checks.h"
#include "sampling/sampler_state.h"
#include "sampling/sampler_step.h"

namespace lmdecode::sampling {

constexpr int64_t kMostTokens = (int64_t{1} << 31) - 1;
// Flags of a step.
constexpr int64_t kAccept = 1, kRawLogProbs = 2, kStageCounts = 4;

// sizes: vocab, text_capacity, rules_capacity.
inline SamplerLayout layout_of(const char* op, int64_t vocab, int64_t text_capacity,
                               int64_t rules_capacity) {
  if (vocab < 1 || vocab > kMostTokens) {
    fail(op, "vocab is ", vocab, "; expected 1 to 2^31 - 1");
  }
  constexpr int64_t kMost = int64_t{1} << 28;
  if (text_capacity < 0 || text_capacity > kMost) {
    fail(op, "text_capacity is ", text_capacity, "; expected 0 to 2^28");
  }
  if (rules_capacity < 0 || rules_capacity > kMost) {
    fail(op, "rules_capacity is ", rules_capacity, "; expected 0 to 2^28");
  }
  return SamplerLayout::of(vocab, text_capacity, rules_capacity);
}

inline void check_state(const char* op, const char* name, const Tensor& state,
                        const SamplerLayout& layout) {
  check_rank(op, name, state, 2, "[batch, bytes]");
  check_dtype(op, name, state, ScalarType::Byte);
  if (state.size(1) != layout.size || !state.is_contiguous()) {
    fail(op, name, " has shape ", shape_text(state), "; expected [batch, ", layout.size,
         "], contiguous");
  }
  if (state.size(0) > 0 && reinterpret_cast<uintptr_t>(state.const_data_ptr()) % 8 != 0) {
    fail(op, name, " begins at no multiple of 8 bytes; expected memory of its own");
  }
  if (!state.is_cpu()) return;  // a kernel looks at each row
  char* data = static_cast<char*>(const_cast<void*>(state.const_data_ptr()));
  for (int64_t i = 0; i < state.size(0); ++i) {
    if (!SamplerRowView(data + i * layout.size, layout).fits(layout)) {
      fail(op, name, "[", i, "] is not a row of these sizes; expected one of a Sampler");
    }
  }
}

// A step of all rows on the CPU, with room for the tokens of so many: for logits [batch, vocab]
// float32, contiguous, which the caller sets. Each row appends its token.
SamplerStepParams drawing_rows(const Arguments& arguments, Tensor state, int64_t vocab,
                               int64_t text_capacity, int64_t rules_capacity, Tensor results,
                               int64_t steps);

}  // namespace lmdecode::sampling
