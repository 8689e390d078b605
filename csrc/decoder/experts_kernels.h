// Between the products of experts: gates, and the sums of a row's experts.
#pragma once

#include <cstdint>

#include "simd/kernel_levels.h"

namespace lmdecode::decoder {

// inner [rows, columns] = the gate of a clamped expert, see ExpertsConfig.
struct ClampedGateParams {
  float* inner = nullptr;  // the gates, overwritten
  const float* up = nullptr;
  int64_t stride = 0;  // of both
  int64_t rows = 0;
  int64_t columns = 0;
  float alpha = 0.0f;
  float limit = 0.0f;
};

// to [size] = residual + sum of weights[i] * outputs[slots[i]] + gate * shared.
struct ExpertsSumParams {
  const float* outputs = nullptr;  // [slots, size]
  const int32_t* slots = nullptr;  // [chosen]
  const float* weights = nullptr;  // [chosen]
  int64_t chosen = 0;
  int64_t size = 0;
  const float* shared = nullptr;  // [size] or null
  float gate = 1.0f;
  const float* residual = nullptr;  // [size] or null
  float* to = nullptr;
};

}  // namespace lmdecode::decoder

// dot_row: the sum of the products of a and b [size].
LMD_DECLARE_KERNELS(decoder, void clamp_gates(const ClampedGateParams& params);
                    void sum_experts(const ExpertsSumParams& params);
                    float dot_row(const float* a, const float* b, int64_t size);)
