// merge_attention_states: attention over two sets of keys, from the result of each.
//
// lse = log(exp(lse1) + exp(lse2)); out = exp(lse1 - lse) o1 + exp(lse2 - lse) o2, a part of weight
// 0 is not read. If both lse are -inf: 0 and -inf.
#pragma once

#include "attention/sliding_window_attention.h"
#include "common/float64.h"
#include "simd/kernel_levels.h"

namespace lmdecode::attention {

// Outputs and lse of one of the two.
struct AttentionState {
  const void* out = nullptr;   // [sequences, heads, tokens, size] by its strides
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
  void* out = nullptr;   // [sequences, heads, tokens, size], elements side by side
  float* lse = nullptr;  // [sequences, heads, tokens]
  AttentionStrides out_strides, lse_strides;

  LMD_HOST_DEVICE int64_t rows() const { return sequences * heads * tokens; }
};

// How the two of a row are weighed.
struct MergeShares {
  double share[2];  // 0: not read
  double sum;
  float lse;

  static LMD_HOST_DEVICE MergeShares of(float lse1, float lse2) {
    const double lse[2] = {static_cast<double>(lse1), static_cast<double>(lse2)};
    const double top = lse[0] > lse[1] ? lse[0] : lse[1];
    MergeShares shares = {{0.0, 0.0}, 0.0, 0.0f};
    for (int i = 0; i < 2; ++i) {
      if (lse[i] > static_cast<double>(minus_infinity())) shares.share[i] = exp_f64(lse[i] - top);
      if (lse[i] != lse[i]) shares.share[i] = lse[i];
      shares.sum += shares.share[i];
    }
    shares.lse = shares.sum == 0.0 ? minus_infinity()
                                   : static_cast<float>(top + natural_log_f64(shares.sum));
    return shares;
  }
  LMD_HOST_DEVICE float factor(int i) const { return static_cast<float>(share[i] / sum); }
};

void merge_attention_states_cpu(const MergeAttentionStatesParams& params);
void merge_attention_states_cuda(const MergeAttentionStatesParams& params, void* stream);

}  // namespace lmdecode::attention

LMD_DECLARE_KERNELS(attention,
                    void merge_attention_states_rows(const MergeAttentionStatesParams& params,
                                                     int64_t begin, int64_t end);)
