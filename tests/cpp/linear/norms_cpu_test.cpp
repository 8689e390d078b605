// The norms at every level, also in place, on memory of exactly its size, in double precision.
#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "linear/norms.h"
#include "simd/cpu_capability.h"

namespace lmdecode::linear {

namespace {

using Rows = void (*)(const NormParams& params, int64_t begin, int64_t end);

struct Level {
  Rows layer_norm, rms_norm;
};

std::vector<Level> levels() {
  std::vector<Level> all = {{&default_::linear::layer_norm_rows, &default_::linear::rms_norm_rows}};
#if defined(LMD_HAS_AVX512)
  if (max_cpu_capability() >= CpuCapability::kAvx2) {
    all.push_back({&avx2::linear::layer_norm_rows, &avx2::linear::rms_norm_rows});
  }
  if (max_cpu_capability() >= CpuCapability::kAvx512) {
    all.push_back({&avx512::linear::layer_norm_rows, &avx512::linear::rms_norm_rows});
  }
#endif
  return all;
}

constexpr double kEps = 1e-5;

// What `rows` makes of x in place, compared.
void compare(Rows rows, bool is_layer_norm, int64_t size, bool has_gamma, bool has_beta) {
  constexpr int64_t kRows = 3;
  const size_t columns = static_cast<size_t>(size);
  std::mt19937 random(static_cast<unsigned>(size));
  std::normal_distribution<float> normal(1.0f, 2.0f);
  const auto fill = [&](std::vector<float>* values) {
    for (float& value : *values) value = normal(random);
  };
  std::vector<float> x(kRows * columns), gamma(columns), beta(columns);
  fill(&x);
  fill(&gamma);
  fill(&beta);
  std::vector<float> y = x;
  NormParams p;
  p.x = y.data();
  p.y = y.data();
  p.x_stride = p.y_stride = p.size = size;
  p.rows = kRows;
  p.gamma = has_gamma ? gamma.data() : nullptr;
  p.beta = has_beta ? beta.data() : nullptr;
  p.eps = static_cast<float>(kEps);
  rows(p, 0, 1);
  rows(p, 1, kRows);
  for (size_t r = 0; r < kRows; ++r) {
    const float* row = x.data() + r * columns;
    double mean = 0.0, squares = 0.0;
    for (size_t i = 0; is_layer_norm && i < columns; ++i) mean += static_cast<double>(row[i]);
    mean /= static_cast<double>(size);
    for (size_t i = 0; i < columns; ++i) {
      squares += (static_cast<double>(row[i]) - mean) * (static_cast<double>(row[i]) - mean);
    }
    const double factor = 1.0 / std::sqrt(squares / static_cast<double>(size) + kEps);
    for (size_t i = 0; i < columns; ++i) {
      double want = (static_cast<double>(row[i]) - mean) * factor;
      if (has_gamma) want *= static_cast<double>(gamma[i]);
      if (has_beta) want += static_cast<double>(beta[i]);
      CHECK(std::fabs(want - static_cast<double>(y[r * columns + i])) < 1e-5);
    }
  }
}

TEST(every_level_normalises) {
  for (const Level& level : levels()) {
    for (const int64_t size : {1, 2, 7, 8, 9, 16, 31, 33, 64, 100, 1030}) {
      for (const bool has_gamma : {false, true}) {
        compare(level.rms_norm, false, size, has_gamma, false);
        for (const bool has_beta : {false, true}) {
          compare(level.layer_norm, true, size, has_gamma, has_beta);
        }
      }
    }
  }
}

}  // namespace
}  // namespace lmdecode::linear

CHECK_MAIN()
