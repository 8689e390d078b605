// From products to scores on a GPU, where more is asked than a window: softcap, ALiBi, masks.
#pragma once

#include "attention/attention_rows.h"
#include "common/cuda_intrinsics.cuh"
#include "common/exp_weight.h"

namespace lmdecode::attention::cuda_kernels {

__device__ __forceinline__ float mask_term(float value) {
  return value > kMaskedScore ? value : minus_infinity();  // NaN in a mask hides
}

// The exponent of two of a weight below a large maximum, as subtract_large() of the CPU has it.
__device__ __forceinline__ float exponent_below_large(float score, float factor, float maximum) {
  return __fadd_rn(__fmul_rn(score, factor), 0.0f - maximum);
}

class ScoreRule {
 public:
  // Parameters of one row.
  struct Row {
    float slope;
    int64_t position;
    int64_t mask_at;  // of key 0
  };

  __device__ ScoreRule(const SlidingWindowAttentionParams& p, const AttentionRows& rows)
      : p_(p), rows_(rows) {}

  // From what the softmax is given, products or scores, to exponents of two.
  __device__ float exponent_factor() const {
    const double scale = needs_score_rule(p_) ? 1.0 : static_cast<double>(p_.scale);
    return static_cast<float>(scale * kLog2E);
  }

  __device__ Row row(int row) const {
    const int64_t sequence = rows_.sequence.index, head = rows_.head(row), token = rows_.token(row);
    Row of_row = {0.0f, 0, 0};
    if (p_.alibi_slopes != nullptr) {
      of_row.slope = p_.alibi_slopes[sequence * p_.alibi_sequence_stride + head];
      of_row.position = rows_.sequence.position(p_, token);
    }
    if (p_.mask_type != MaskType::kNone) {
      const AttentionStrides& s = p_.mask_strides;
      of_row.mask_at = sequence * s.sequence + head * s.head + token * s.token;
    }
    return of_row;
  }

  // The score of a row and a key of its sequence.
  __device__ float score(float product, const Row& row, int64_t key) const {
    float x = product * p_.scale;
    if (p_.softcap != 0.0f) x = p_.softcap * tanhf(x / p_.softcap);
    if (p_.alibi_slopes != nullptr) x -= row.slope * fabsf(static_cast<float>(row.position - key));
    float term = 0.0f;
    if (p_.mask_type != MaskType::kNone) {
      term = mask_at(row.mask_at + key * p_.mask_strides.element);
    }
    if (p_.key_padding != nullptr &&
        !p_.key_padding[rows_.sequence.index * p_.key_padding_strides.sequence +
                        key * p_.key_padding_strides.token]) {
      term = minus_infinity();
    }
    // Does not read x: a hidden NaN has no influence.
    return term == minus_infinity() ? term : x + term;
  }

 private:
  __device__ float mask_at(int64_t at) const {
    switch (p_.mask_type) {
      case MaskType::kBool:
        return static_cast<const bool*>(p_.mask)[at] == p_.mask_true_is_visible ? 0.0f
                                                                                : minus_infinity();
      case MaskType::kFloat32:
        return mask_term(static_cast<const float*>(p_.mask)[at]);
      case MaskType::kFloat16:
        return mask_term(to_float(static_cast<const Half*>(p_.mask)[at]));
      case MaskType::kBFloat16:
        return mask_term(to_float(static_cast<const BFloat16*>(p_.mask)[at]));
      default:
        return 0.0f;
    }
  }

  const SlidingWindowAttentionParams& p_;
  const AttentionRows& rows_;
};

}  // namespace lmdecode::attention::cuda_kernels
