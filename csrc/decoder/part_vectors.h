// Vectors of rows; the last one may be partial. For kernel files: compiled once for each CPU
// capability.
#pragma once

#include "simd/vec_math.h"
#include "simd/vec_round.h"

namespace lmdecode::LMD_SIMD::decoder {

// The next n >= 1 floats at p: a whole vector, or as many lanes and zeros.
inline F32 read(const float* p, int64_t n) {
  return n >= kLanes ? load(p) : load_part(p, static_cast<int>(n), 0.0f);
}

// Writes as many lanes of a to p.
inline void write(float* p, F32 a, int64_t n) {
  n >= kLanes ? store(p, a) : store_part(p, a, static_cast<int>(n));
}

inline F32 silu(F32 x) { return x / (splat(1.0f) + exp_of(splat(0.0f) - x)); }

}  // namespace lmdecode::LMD_SIMD::decoder
