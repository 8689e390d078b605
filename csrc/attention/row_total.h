// The maximum, divisor and lse of a row, for the CPU and the CUDA kernels.
#pragma once

#include "common/exp_weight.h"
#include "common/float64.h"

namespace lmdecode::attention {

// Whether a maximum, an exponent of two, is so large that it is rounded by 4 and more.
LMD_HOST_DEVICE bool is_large(float maximum) {
  constexpr float kLarge = 0x1p26f;
  return maximum >= kLarge || (maximum <= -kLarge && maximum > minus_infinity());
}

// The sum of a row's weights, sink included: out / divisor is the result.
struct RowTotal {
  double max;  // exponent of two
  double sum;
  float divisor;

  // sink: null for none.
  static LMD_HOST_DEVICE RowTotal of(double max, double sum, const float* sink) {
    if (sink == nullptr) return {max, sum, static_cast<float>(sum)};
    const double score = static_cast<double>(*sink) * kLog2E;
    const double top = score > max ? score : max;
    // A sink of -inf has no weight; one of NaN, which is never the top, is in the total.
    if (top == static_cast<double>(minus_infinity()) && score == top) {
      return {max, sum, static_cast<float>(sum)};
    }
    const double share = exp2_f64(max - top);
    // inf has all the weight.
    const double total = sum * share + (score == top ? 1.0 : exp2_f64(score - top));
    return {top, total, static_cast<float>(total / share)};
  }
  LMD_HOST_DEVICE bool is_empty() const { return sum == 0.0; }
  LMD_HOST_DEVICE float lse() const {
    return is_empty() ? minus_infinity() : static_cast<float>((max + log2_f64(sum)) / kLog2E);
  }
};

}  // namespace lmdecode::attention
