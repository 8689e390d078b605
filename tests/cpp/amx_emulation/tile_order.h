// Sums of bfloat16 in the order of tiles (docs/reference/linear.md), one number at a time.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "amx_emulation.h"

namespace amx_emulation {

inline float rounded_to_bfloat16(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, 4);
  if (std::isnan(value)) return value;
  bits = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
  std::memcpy(&value, &bits, 4);
  return value;
}

// The sum of a[i * a_stride] * b[i * b_stride], i < size, both rounded to bfloat16.
inline float sum_in_order_of_tiles(const float* a, int64_t a_stride, const float* b,
                                   int64_t b_stride, int64_t size) {
  float sum = 0.0f;
  for (int64_t first = 0; first < size; first += 32) {
    float chain[2] = {0.0f, 0.0f};
    for (int64_t i = first; i < first + 32; ++i) {
      const bool is_padding = i >= size;
      const float left = is_padding ? 0.0f : rounded_to_bfloat16(a[i * a_stride]);
      const float right = is_padding ? 0.0f : rounded_to_bfloat16(b[i * b_stride]);
      chain[i % 2] = flushed_multiply_add(left, right, chain[i % 2]);
    }
    const float both = flushed_multiply_add(chain[0], 1.0f, chain[1]);
    sum = flushed_multiply_add(both, 1.0f, sum);
  }
  return sum;
}

}  // namespace amx_emulation
