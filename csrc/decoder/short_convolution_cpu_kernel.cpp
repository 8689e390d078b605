// Compiled once for each CPU capability, with LMD_SIMD naming it.
#include "decoder/part_vectors.h"
#include "decoder/state_layer_kernels.h"
#include "simd/vec_math.h"

namespace lmdecode::LMD_SIMD::decoder {

using namespace lmdecode::decoder;

namespace {

constexpr int64_t kBlock = 256;  // channels: their last inputs fit the L1 cache

// kTaps is the number of taps, or 0 where it is known at run time only.
template <int kTaps>
void run_block(const ShortConvolutionParams& p, const StateSegment& segment, int64_t first,
               int64_t size) {
  const int64_t taps = kTaps > 0 ? kTaps : p.taps, kept = taps - 1;
  alignas(64) float before[kMostTaps][kBlock + kLanes];  // a ring
  const float* const source =
      segment.source < 0 ? nullptr : p.state.states + segment.source * p.state.slot_stride;
  for (int64_t tap = 0; tap < kept; ++tap) {
    for (int64_t c = 0; c < size; ++c) {
      before[tap][c] = source == nullptr ? 0.0f : source[tap * p.channels + first + c];
    }
  }
  const StateTarget* target = segment.targets;
  const StateTarget* const last_target = target + segment.num_targets;
  int64_t oldest = 0;
  for (int64_t t = 0; t < segment.count; ++t) {
    float* const row = p.rows + (segment.row + t) * p.row_stride + first;
    for (int64_t c = 0; c < size; c += kLanes) {
      const int64_t n = size - c;
      F32 input = read(row + c, n);
      if (p.out != nullptr) input = input * read(row + 2 * p.channels + c, n);
      F32 sum = p.bias == nullptr ? splat(0.0f) : read(p.bias + first + c, n);
      const float* weights = p.kernel + first + c;
      for (int64_t tap = 0, at = oldest; tap < kept; ++tap, weights += p.channels) {
        sum = multiply_add(load(before[at] + c), read(weights, n), sum);
        at = at + 1 == kept ? 0 : at + 1;
      }
      sum = multiply_add(input, read(weights, n), sum);
      if (kept > 0) store(before[oldest] + c, input);
      if (p.out != nullptr) {
        const F32 gate = read(row + p.channels + c, n);
        write(p.out + (segment.row + t) * p.channels + first + c, gate * sum, n);
      } else {
        write(row + c, silu(sum), n);
      }
    }
    if (kept > 0) oldest = oldest + 1 == kept ? 0 : oldest + 1;
    for (; target != last_target && target->token == t; ++target) {
      float* const to = p.state.states + target->slot * p.state.slot_stride + first;
      for (int64_t tap = 0, at = oldest; tap < kept; ++tap) {
        for (int64_t c = 0; c < size; ++c) to[tap * p.channels + c] = before[at][c];
        at = at + 1 == kept ? 0 : at + 1;
      }
    }
  }
}

}  // namespace

void short_convolution(const ShortConvolutionParams& p, int64_t begin, int64_t end) {
  for (int64_t i = 0; i < p.state.count; ++i) {
    for (int64_t first = begin; first < end; first += kBlock) {
      const int64_t size = end - first < kBlock ? end - first : kBlock;
      switch (p.taps) {
        case 3:
          run_block<3>(p, p.state.segments[i], first, size);
          break;
        case 4:
          run_block<4>(p, p.state.segments[i], first, size);
          break;
        default:
          run_block<0>(p, p.state.segments[i], first, size);
      }
    }
  }
}

}  // namespace lmdecode::LMD_SIMD::decoder
