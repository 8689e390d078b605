// Layer norm and RMS norm of rows, statistics in f32.
//
//   layer_norm  y = (x - mean) / sqrt(variance + eps) * gamma + beta, variance biased, of x - mean
//   rms_norm    y = x / sqrt(mean(x^2) + eps) * gamma
//
// A row of y depends on its row of x alone. Order of additions, and so the last bits, differ from
// level to level.
#pragma once

#include <cstdint>

#include "simd/kernel_levels.h"

namespace lmdecode::linear {

struct NormParams {
  const float* x = nullptr;  // [rows, size], elements side by side
  int64_t x_stride = 0;
  float* y = nullptr;  // [rows, size]; may be x itself, with its stride
  int64_t y_stride = 0;
  int64_t rows = 0;
  int64_t size = 0;
  const float* gamma = nullptr;  // [size]; null: 1
  const float* beta = nullptr;   // [size]; null: 0; for layer_norm alone
  float eps = 0.0f;
};

// Rows [begin, end), on the calling thread: for use inside parallel regions. Needs IEEE mode
// (common/float_mode.h), throws nothing.
void layer_norm_range(const NormParams& params, int64_t begin, int64_t end);
void rms_norm_range(const NormParams& params, int64_t begin, int64_t end);

// All rows, on torch's threads.
void layer_norm(const NormParams& params);
void rms_norm(const NormParams& params);

}  // namespace lmdecode::linear

LMD_DECLARE_KERNELS(linear,
                    void layer_norm_rows(const NormParams& params, int64_t begin, int64_t end);
                    void rms_norm_rows(const NormParams& params, int64_t begin, int64_t end);)
