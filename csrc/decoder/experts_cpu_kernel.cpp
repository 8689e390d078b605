// Compiled once for each CPU capability, with LMD_SIMD naming it.
#include "decoder/experts_kernels.h"
#include "simd/vec_math.h"
#include "simd/vec_round.h"

namespace lmdecode::LMD_SIMD::decoder {

using namespace lmdecode::decoder;

namespace {

inline F32 load_columns(const float* p, int64_t left) {
  return left >= kLanes ? load(p) : load_part(p, static_cast<int>(left), 0.0f);
}

inline void store_columns(float* p, F32 value, int64_t left) {
  left >= kLanes ? store(p, value) : store_part(p, value, static_cast<int>(left));
}

// NaN stays.
inline F32 at_most(F32 limit, F32 x) {
  return splat(0.0f) - max(splat(0.0f) - limit, splat(0.0f) - x);
}

}  // namespace

void clamp_gates(const ClampedGateParams& p) {
  const F32 limit = splat(p.limit), low = splat(-p.limit), one = splat(1.0f);
  for (int64_t row = 0; row < p.rows; ++row) {
    float* const inner = p.inner + row * p.stride;
    const float* const up = p.up + row * p.stride;
    for (int64_t i = 0; i < p.columns; i += kLanes) {
      const int64_t left = p.columns - i;
      const F32 gate = at_most(limit, load_columns(inner + i, left));
      const F32 other = max(low, at_most(limit, load_columns(up + i, left)));
      const F32 sigmoid = one / (one + exp_of(splat(-p.alpha) * gate));
      store_columns(inner + i, (other + one) * (gate * sigmoid), left);
    }
  }
}

void sum_experts(const ExpertsSumParams& p) {
  for (int64_t i = 0; i < p.size; i += kLanes) {
    const int64_t left = p.size - i;
    F32 sum = splat(0.0f);
    for (int64_t e = 0; e < p.chosen; ++e) {
      const F32 output = load_columns(p.outputs + p.slots[e] * p.size + i, left);
      sum = sum + splat(p.weights[e]) * output;
    }
    if (p.shared != nullptr) sum = sum + splat(p.gate) * load_columns(p.shared + i, left);
    if (p.residual != nullptr) sum = load_columns(p.residual + i, left) + sum;
    store_columns(p.to + i, sum, left);
  }
}

float dot_row(const float* a, const float* b, int64_t size) {
  F32 even = splat(0.0f), odd = splat(0.0f);
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    even = accumulate(load(a + i), load(b + i), even);
    odd = accumulate(load(a + i + kLanes), load(b + i + kLanes), odd);
  }
  for (; i < size; i += kLanes) {
    even = accumulate(load_columns(a + i, size - i), load_columns(b + i, size - i), even);
  }
  alignas(64) float lane[kLanes];
  store(lane, even + odd);
  double total = 0.0;
  for (const float value : lane) total += static_cast<double>(value);
  return static_cast<float>(total);
}

}  // namespace lmdecode::LMD_SIMD::decoder
