// Rotates features, so that rows with few large elements lose less by rounding: x' = x R, and W' =
// W R gives x' W'^T = x W^T. R is blocks of Hadamard matrices / sqrt(size) in Sylvester's order,
// each its own inverse: blocks of 64 features, then at most one each of 32 and 16; remaining
// features stay.
//
// One order at every level: a block is multiplied by 1 / sqrt(size), then (a, b) -> (a + b, a - b)
// of elements 1, 2, 4, ... apart. An element of a rotated row may be up to 8 times the largest of
// the row: beyond float32's range it is inf.
#pragma once

#include <cstdint>

namespace lmdecode::linear {

constexpr int64_t kRotatedBlock = 64, kLeastRotatedBlock = 16;

// Size of the block at `at`; 0: the remaining features stay.
constexpr int64_t rotated_block(int64_t at, int64_t size) {
  for (int64_t block = kRotatedBlock; block >= kLeastRotatedBlock; block /= 2) {
    if (size - at >= block) return block;
  }
  return 0;
}

// 1 / sqrt(block), rounded.
constexpr float rotation_scale(int64_t block) {
  return block == 64 ? 0.125f : block == 32 ? 0x1.6a09e6p-3f : 0.25f;
}

inline void rotate_block(float* values, int64_t block) {
  for (int64_t i = 0; i < block; ++i) values[i] *= rotation_scale(block);
  for (int64_t apart = 1; apart < block; apart *= 2) {
    for (int64_t first = 0; first < block; first += 2 * apart) {
      for (int64_t i = first; i < first + apart; ++i) {
        const float a = values[i], b = values[i + apart];
        values[i] = a + b;
        values[i + apart] = a - b;
      }
    }
  }
}

inline void rotate_row(float* row, int64_t size) {
  for (int64_t at = 0, block; (block = rotated_block(at, size)) > 0; at += block) {
    rotate_block(row + at, block);
  }
}

}  // namespace lmdecode::linear
