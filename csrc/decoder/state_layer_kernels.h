// Kernels of layers with a state: the gated delta rule, Mamba-2, short convolutions.
#pragma once

#include "decoder/layer_state.h"
#include "simd/kernel_levels.h"

namespace lmdecode::decoder {

// --- layers with a matrix for each head: the gated delta rule and Mamba-2

struct HeadStatesParams {
  MixerConfig config;
  StateSegments state;    // the part of a state after convolution_state()
  float* rows = nullptr;  // [rows, config.projected()], row_stride apart
  int64_t row_stride = 0;
  float* gates = nullptr;  // [rows, gate_stride()] of the layer's kind
  float* out = nullptr;    // [rows, config.mixed()], out_stride apart
  int64_t out_stride = 0;
  const float* gamma = nullptr;  // of the norm of out
  float norm_epsilon = 0.0f;
};

constexpr int64_t kStateColumns = 32;  // of a matrix in a task

// --- the gated delta rule
//
// The gated delta rule, token by token: of each value head a matrix S [key_size, value_size] that
//
//   S = g S + k delta^T,  delta = beta (v - g S^T k),  out = g S^T q + (k q) delta
//
// so that out is the new S^T q. A few columns of S lie in the L1 cache and are read and written
// once a token: the update of a token and the products of the next one are one pass. The sum over
// the keys has one order, so the bits depend neither on how rows are cut nor on threads. The
// chunked form of the rule (products of matrices) has not been tried.

// rows: q, k, v, z, b, a. gates: g, beta of value heads, k q of key heads. gamma: [value_size].
struct DeltaRuleParams : HeadStatesParams {
  int64_t gate_stride() const { return 2 * config.value_heads + config.key_heads; }
  const float* queries(int64_t row) const { return rows + row * row_stride; }
  const float* keys(int64_t row) const { return queries(row) + config.key_heads * config.key_size; }
  const float* values(int64_t row) const { return keys(row) + config.key_heads * config.key_size; }
  const float* output_gates(int64_t row) const { return queries(row) + config.channels(); }
};

constexpr float kLengthEpsilon = 1e-6f;  // added to the squared length of queries and keys

// --- Mamba-2
//
// The state space of Mamba-2, token by token: of each head a matrix H [key_size, value_size] that
//
//   H = g H + B (dt x)^T,  out = H^T C + skip x,  g = exp(dt decay)
//
// with dt = softplus(dt + decay_bias) within its limits. B and C are a group's of heads.
//
// An element of H does not depend on the others. So some columns of H stay in registers while a few
// tokens change them, row by row: each element is read and written once for kMambaTokens tokens.
// The products are the same as token by token, and sums over the rows have one order. So the bits
// depend neither on how rows are cut nor on threads. Products of matrices would take 3/4 of the
// operations at most.

// rows: z, x, B, C, dt. gates: g and dt of heads. gamma: [config.mixed()], or null: no norm.
struct Mamba2Params : HeadStatesParams {
  const float* skip = nullptr;  // [value_heads]

  int64_t gate_stride() const { return 2 * config.value_heads; }
  const float* output_gates(int64_t row) const { return rows + row * row_stride; }
  const float* values(int64_t row) const { return output_gates(row) + config.mixed(); }
  const float* keys(int64_t row) const { return values(row) + config.mixed(); }
  const float* queries(int64_t row) const { return keys(row) + config.key_heads * config.key_size; }
  const float* steps(int64_t row) const { return values(row) + config.channels(); }
};

constexpr int64_t kMambaTokens = 4;  // tokens for one pass over H

// --- short convolutions
//
// A causal convolution of each feature over the last tokens. The state is its last inputs.
//
//   gated: u = B x, out = C convolution(u), where a row is B, C and x, [channels] each
//   else:  u = row, row = silu(convolution(u)), in place
//
// Taps are added from the oldest token on, so a channel's bits do not depend on how rows are cut.

struct ShortConvolutionParams {
  StateSegments state;  // the first [taps - 1, channels] of a state, the oldest first
  int64_t channels = 0;
  int64_t taps = 0;
  const float* kernel = nullptr;  // [taps, channels]
  const float* bias = nullptr;    // [channels] or null
  float* rows = nullptr;          // [rows, row_stride]
  int64_t row_stride = 0;
  float* out = nullptr;  // [rows, channels] where it is gated; else null
};

// Fewest channels of a thread's task.
constexpr int64_t kConvolutionChannels = 64;

}  // namespace lmdecode::decoder

// delta_rule_keys: queries and keys of rows to length 1, queries by key_size^-1/2, and their
// products. delta_rule: of parts of [begin, end), which are (value head, kStateColumns columns),
// all segments. delta_rule_norm: out = rms_norm(out) silu(z) of rows.
LMD_DECLARE_KERNELS(decoder,
                    void delta_rule_keys(const DeltaRuleParams& params, int64_t begin, int64_t end);
                    void delta_rule(const DeltaRuleParams& params, int64_t begin, int64_t end);
                    void delta_rule_norm(const DeltaRuleParams& params, int64_t begin,
                                         int64_t end);)

// mamba2_scan: of tasks of [begin, end), which are (head, kStateColumns columns), all segments.
// mamba2_norm: of rows out = norm(out silu(z)), or norm(out) silu(z), where a norm is of a group.
LMD_DECLARE_KERNELS(decoder,
                    void mamba2_scan(const Mamba2Params& params, int64_t begin, int64_t end);
                    void mamba2_norm(const Mamba2Params& params, int64_t begin, int64_t end);)

// Runs all segments on the channels [begin, end).
LMD_DECLARE_KERNELS(decoder, void short_convolution(const ShortConvolutionParams& params,
                                                    int64_t begin, int64_t end);)
