// merge_attention_states: attention over two sets of keys, from what each gave.
//
// lse = log(exp(lse1) + exp(lse2)); out = exp(lse1 - lse) o1 + exp(lse2 - lse) o2, where a part of
// no weight is not read. Where both lse are -inf: 0 and -inf.
#pragma once

#include "attention/sliding_window_attention.h"

namespace lmdecode {

// Outputs and lse of one of the two.
struct AttentionState {
  const void* out = nullptr;  // [sequences, heads, tokens, size] by its strides
  const float* lse = nullptr;  // [sequences, heads, tokens]
  AttentionStrides out_strides, lse_strides;
};

struct MergeAttentionStatesParams {
  DType dtype = DType::kFloat32;
  int64_t sequences = 0;
  int64_t heads = 0;
  int64_t tokens = 0;
  int64_t size = 0;
  AttentionState states[2];
  void* out = nullptr;  // [sequences, heads, tokens, size], elements side by side
  float* lse = nullptr;  // [sequences, heads, tokens]
  AttentionStrides out_strides, lse_strides;

  int64_t rows() const { return sequences * heads * tokens; }
};

void merge_attention_states_cpu(const MergeAttentionStatesParams& params);

}  // namespace lmdecode
