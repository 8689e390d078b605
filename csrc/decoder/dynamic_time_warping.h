// dynamic_time_warping: the cheapest monotonic path through a matrix of tokens and frames, which
// says in what frame each token begins. docs/reference/decoder.md is the user's page.
#pragma once

#include <cstdint>

#include "common/bits.h"

namespace lmdecode::decoder {

struct DynamicTimeWarpingParams {
  int64_t tokens = 0;
  int64_t frames = 0;
  const float* cost = nullptr;      // [tokens, frames]
  float* sums = nullptr;            // [2, frames + 1], scratch
  uint8_t* steps = nullptr;         // [tokens, frames], scratch
  int64_t* first_frames = nullptr;  // [tokens]: on the path, the first frame of each
};

// The path goes from the first token and frame to the last ones. A step of it is one token on, one
// frame on, or both. Of equal sums the frame on is taken, unless both is less than either. Sums are
// rounded to f32. With NaN the path is some path.
inline void dynamic_time_warping_cpu(const DynamicTimeWarpingParams& p) {
  enum Step : uint8_t { kBoth, kToken, kFrame };
  float* before = p.sums;
  float* sums = p.sums + p.frames + 1;
  before[0] = 0.0f;
  for (int64_t frame = 1; frame <= p.frames; ++frame) before[frame] = plus_infinity();
  for (int64_t token = 0; token < p.tokens; ++token) {
    const float* const cost = p.cost + token * p.frames;
    uint8_t* const steps = p.steps + token * p.frames;
    sums[0] = plus_infinity();
    for (int64_t frame = 0; frame < p.frames; ++frame) {
      const float both = before[frame], by_token = before[frame + 1], by_frame = sums[frame];
      float sum = by_frame;
      Step step = kFrame;
      if (both < by_token && both < by_frame) {
        sum = both;
        step = kBoth;
      } else if (by_token < both && by_token < by_frame) {
        sum = by_token;
        step = kToken;
      }
      sums[frame + 1] = static_cast<float>(static_cast<double>(cost[frame]) + sum);
      steps[frame] = step;
    }
    float* const other = before;
    before = sums;
    sums = other;
  }
  int64_t frame = p.frames - 1;
  for (int64_t token = p.tokens - 1; token >= 0;) {
    p.first_frames[token] = frame > 0 ? frame : 0;
    const uint8_t step = frame < 0 ? uint8_t{kToken} : p.steps[token * p.frames + frame];
    if (step != kFrame) --token;
    if (step != kToken) --frame;
  }
}

}  // namespace lmdecode::decoder
