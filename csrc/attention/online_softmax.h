// The softmax of rows that see their keys step by step, in exponents of two.
#pragma once

#include "attention/attention_vec.h"
#include "attention/row_total.h"

namespace lmdecode::LMD_SIMD::attention {

using namespace lmdecode::attention;

// score * factor + shift. Fused, as the two nearly cancel: rounding the product first costs a
// weight 2e-6 at scores of some tens.
inline F32 exponent_of(F32 score, F32 factor, F32 shift) {
#if defined(LMD_SIMD_AVX2) || defined(LMD_SIMD_AVX512)
  return multiply_add(score, factor, shift);
#else
  for (int i = 0; i < kLanes; ++i) {
    const double product = static_cast<double>(score.v[i]) * static_cast<double>(factor.v[i]);
    score.v[i] = static_cast<float>(product + static_cast<double>(shift.v[i]));
  }
  return score;
#endif
}

// scores[begin .. end) become exponents below a large maximum. Products are rounded as the maximum
// was, so that none is above 0.
inline void subtract_large(float* scores, int64_t begin, int64_t end, float factor, float maximum) {
  for (int64_t key = begin; key < end; key += kLanes) {
    store(scores + key, load(scores + key) * splat(factor) - splat(maximum));
  }
}

class OnlineSoftmax {
 public:
  static constexpr int64_t kSumLanes = 16;

  // row_max [rows], row_sum [rows, 16]; factor: from scores to exponents of two, not below 0.
  OnlineSoftmax(float* row_max, float* row_sum, float factor)
      : row_max_(row_max), row_sum_(row_sum), factor_(factor) {}

  void reset(int64_t rows) {
    for (int64_t row = 0; row < rows; ++row) row_max_[row] = minus_infinity();
    for (int64_t i = 0; i < rows * kSumLanes; ++i) row_sum_[i] = 0.0f;
  }

  // Turns scores[begin .. end) into weights, calls put(key, weight) once for each, and rescales the
  // sums so far, out [size], to the new maximum. begin and end are multiples of 16.
  template <class Put>
  void add(int64_t row, float* scores, int64_t begin, int64_t end, float* out, int64_t size,
           const Put& put) {
    F32 top = load(scores + begin);
    for (int64_t key = begin + kLanes; key < end; key += kLanes) top = max(load(scores + key), top);
    const float old_max = row_max_[row], step_max = reduce_max(top) * factor_;
    const float new_max = step_max > old_max ? step_max : old_max;
    constexpr int kParts = kSumLanes / kLanes;
    F32 sum[kParts];
    for (int i = 0; i < kParts; ++i) sum[i] = load(row_sum_ + row * kSumLanes + i * kLanes);
    if (new_max > old_max) [[unlikely]] {
      row_max_[row] = new_max;
      if (old_max > minus_infinity()) {
        const F32 share = splat(exp2_of(old_max - new_max));
        for (int i = 0; i < kParts; ++i) sum[i] = sum[i] * share;
        for (int64_t i = 0; i < size; i += kLanes) store(out + i, load(out + i) * share);
      }
    }
    // No key seen so far: shift by 0, so that -inf and NaN propagate.
    F32 shift = splat(new_max > minus_infinity() ? 0.0f - new_max : 0.0f);
    F32 factor = splat(factor_);
    if (is_large(new_max)) [[unlikely]] {
      subtract_large(scores, begin, end, factor_, new_max);
      shift = splat(0.0f);
      factor = splat(1.0f);
    }
    for (int64_t key = begin; key < end; key += kSumLanes) {
      F32 weight[kParts];
      for (int i = 0; i < kParts; ++i) {
        weight[i] = exp2_of(exponent_of(load(scores + key + i * kLanes), factor, shift));
        sum[i] = sum[i] + weight[i];
        put(key + i * kLanes, weight[i]);
      }
    }
    for (int i = 0; i < kParts; ++i) store(row_sum_ + row * kSumLanes + i * kLanes, sum[i]);
  }

  float max_of_row(int64_t row) const { return row_max_[row]; }
  double sum_of_row(int64_t row) const { return sum_of_lanes(row_sum_ + row * kSumLanes); }
  static double sum_of_lanes(const float* lanes) {
    double sum = 0.0;
    for (int64_t i = 0; i < kSumLanes; ++i) sum += static_cast<double>(lanes[i]);
    return sum;
  }

 private:
  float* row_max_;
  float* row_sum_;
  float factor_;
};

}  // namespace lmdecode::LMD_SIMD::attention
