// Compiled once for each CPU capability, with LMD_SIMD naming it.
#include "linear/norms.h"
#include "simd/vec_math.h"
#include "simd/vec_round.h"

namespace lmdecode::LMD_SIMD::linear {

using namespace lmdecode::linear;

namespace {

// Lanes in f32, their totals in f64.
class RowSum {
 public:
  void add(F32 a) { sum_ = sum_ + a; }
  void add_square(F32 a) { sum_ = accumulate(a, a, sum_); }
  double total() const {
    alignas(64) float lane[kLanes];
    store(lane, sum_);
    double total = 0.0;
    for (const float value : lane) total += static_cast<double>(value);
    return total;
  }

 private:
  F32 sum_ = splat(0.0f);
};

// Two sums in turn: additions follow each other at their latency.
template <class Add>
double sum_of_row(const float* x, int64_t size, float fill, const Add& add) {
  RowSum even, odd;
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    add(&even, load(x + i));
    add(&odd, load(x + i + kLanes));
  }
  for (; i < size; i += kLanes) {
    const int left = static_cast<int>(size - i);
    add(&even, left >= kLanes ? load(x + i) : load_part(x + i, left, fill));
  }
  return even.total() + odd.total();
}

inline F32 load_columns(const float* p, int64_t left) {
  return left >= kLanes ? load(p) : load_part(p, static_cast<int>(left), 0.0f);
}

// (x - mean) * factor * gamma + beta
void scale_row(const NormParams& p, const float* x, float mean, float factor, float* y) {
  for (int64_t i = 0; i < p.size; i += kLanes) {
    const int64_t left = p.size - i;
    F32 value = (load_columns(x + i, left) - splat(mean)) * splat(factor);
    if (p.gamma != nullptr) value = value * load_columns(p.gamma + i, left);
    if (p.beta != nullptr) value = value + load_columns(p.beta + i, left);
    if (left >= kLanes) {
      store(y + i, value);
    } else {
      store_part(y + i, value, left);
    }
  }
}

float norm_factor(double sum_of_squares, int64_t size, float eps) {
  const double mean = sum_of_squares / static_cast<double>(size);
  return static_cast<float>(1.0 / __builtin_sqrt(mean + static_cast<double>(eps)));
}

}  // namespace

void layer_norm_rows(const NormParams& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* const x = p.x + row * p.x_stride;
    const double sum = sum_of_row(x, p.size, 0.0f, [](RowSum* to, F32 value) { to->add(value); });
    const float mean = static_cast<float>(sum / static_cast<double>(p.size));
    // The tail is padded with the mean, so it contributes 0.
    const double squares = sum_of_row(
        x, p.size, mean, [mean](RowSum* to, F32 value) { to->add_square(value - splat(mean)); });
    scale_row(p, x, mean, norm_factor(squares, p.size, p.eps), p.y + row * p.y_stride);
  }
}

void rms_norm_rows(const NormParams& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* const x = p.x + row * p.x_stride;
    const double squares =
        sum_of_row(x, p.size, 0.0f, [](RowSum* to, F32 value) { to->add_square(value); });
    scale_row(p, x, 0.0f, norm_factor(squares, p.size, p.eps), p.y + row * p.y_stride);
  }
}

}  // namespace lmdecode::LMD_SIMD::linear
