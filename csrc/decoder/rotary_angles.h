// How far queries and keys are turned at the positions of rows.
#pragma once

#include <cmath>

#include "common/parallel_rows.h"
#include "decoder/causal_forward.h"
#include "decoder/decoder_tuning.h"

namespace lmdecode::decoder {

// Angles in float32, as transformers has them; their sines and cosines rounded once. positions
// [rows]; cosines and sines [num_rotary, max_rows, most_turned() / 2].
inline void rotary_angles(const CausalModel& model, const int64_t* positions, int64_t rows,
                          int64_t max_rows, float* cosines, float* sines) {
  const int64_t half = model.most_turned() / 2;
  for (int64_t rotary = 0; rotary < model.num_rotary; ++rotary) {
    const float* const frequencies = model.frequencies + rotary * half;
    const float scale = model.rotary_scales[rotary];
    // half may be 0
    const double row_nanoseconds = 1.0 + tuning::kNanosecondsPerAngle * static_cast<double>(half);
    parallel_rows(rows, row_nanoseconds, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t at = (rotary * max_rows + row) * half;
        const float position = static_cast<float>(positions[row]);
        for (int64_t i = 0; i < half; ++i) {
          const double angle = static_cast<double>(frequencies[i] * position);
          cosines[at + i] = static_cast<float>(std::cos(angle)) * scale;
          sines[at + i] = static_cast<float>(std::sin(angle)) * scale;
        }
      }
    });
  }
}

}  // namespace lmdecode::decoder
