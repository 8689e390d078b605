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
#pragma once

#include "decoder/head_states.h"
#include "simd/kernel_levels.h"

namespace lmdecode::decoder {

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

constexpr int64_t kMambaTokens = 4;  // that H is read once for

}  // namespace lmdecode::decoder

// mamba2_scan: of tasks of [begin, end), which are (head, kStateColumns columns), all segments.
// mamba2_norm: of rows out = norm(out silu(z)), or norm(out) silu(z), where a norm is of a group.
LMD_DECLARE_KERNELS(decoder,
                    void mamba2_scan(const Mamba2Params& params, int64_t begin, int64_t end);
                    void mamba2_norm(const Mamba2Params& params, int64_t begin, int64_t end);)
