// Layers that keep a state of a sequence instead of keys and values: the mixer that stands where
// attention stands, and which rows go on from which state. docs/reference/causal_models.md is the
// user's page.
#pragma once

#include <cstdint>

namespace lmdecode::decoder {

enum class MixerKind : int32_t {
  kNone = 0,
  kShortConvolution = 1,
  kGatedDeltaRule = 2,
  kMamba2 = 3
};

constexpr int64_t kMostTaps = 16;
constexpr int64_t kMostHeadSize = 1024;  // of keys, and of values

// Sizes, the same in all layers of a model. python/lmdecode/models/mixers.py says what is
// computed. In Mamba-2, keys are B, queries C and values x.
struct MixerConfig {
  MixerKind kind = MixerKind::kNone;
  int64_t size = 0;  // of the model
  int64_t key_heads = 0;
  int64_t value_heads = 0;  // a multiple of key_heads
  int64_t key_size = 0;
  int64_t value_size = 0;
  int64_t taps = 0;  // tokens that the convolution sees
  // For Mamba-2: whether the norm is before the gate, and limits of the steps.
  bool norm_first = false;
  float least_step = 0.0f;
  float most_step = 0.0f;

  bool is_delta_rule() const { return kind == MixerKind::kGatedDeltaRule; }
  bool is_mamba2() const { return kind == MixerKind::kMamba2; }
  bool has_heads() const { return is_delta_rule() || is_mamba2(); }  // each with a matrix
  // Features of the first projection's output, of the convolution's input, and of the last
  // projection takes.
  int64_t projected() const {
    if (is_mamba2()) return mixed() + channels() + value_heads;
    return is_delta_rule() ? channels() + mixed() + 2 * value_heads : 3 * size;
  }
  int64_t channels() const {
    return has_heads() ? 2 * key_heads * key_size + value_heads * value_size : size;
  }
  int64_t mixed() const { return has_heads() ? value_heads * value_size : size; }
  // Floats of a state: the convolution's last inputs, then the heads' matrices.
  int64_t convolution_state() const { return (taps - 1) * channels(); }
  int64_t state_size() const {
    return convolution_state() + (has_heads() ? mixed() * key_size : 0);
  }
};

// A layer's own weights.
struct MixerWeights {
  const float* convolution = nullptr;       // [taps, channels]; the last tap is the token's own
  const float* convolution_bias = nullptr;  // [channels] or null
  const float* decay = nullptr;             // [value_heads]
  const float* decay_bias = nullptr;        // [value_heads]
  const float* norm = nullptr;              // [value_size]; of Mamba-2 [mixed()], or null: no norm
  const float* skip = nullptr;              // [value_heads], of Mamba-2
};

// A state to keep: the one after a token of a segment.
struct StateTarget {
  int64_t token;
  int64_t slot;
};

// Rows side by side that go on from a state.
struct StateSegment {
  int64_t row;
  int64_t count;
  int64_t source;  // the slot of the state before; -1: there was no token before
  const StateTarget* targets;
  int64_t num_targets;
};

struct StateSegments {
  const StateSegment* segments = nullptr;
  int64_t count = 0;
  float* states = nullptr;  // of slot 0, where the layer's begins
  int64_t slot_stride = 0;
};

}  // namespace lmdecode::decoder
