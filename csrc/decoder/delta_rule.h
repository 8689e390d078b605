// The gated delta rule, token by token: of each value head a matrix S [key_size, value_size] that
//
//   S = g S + k delta^T,  delta = beta (v - g S^T k),  out = g S^T q + (k q) delta
//
// so that out is the new S^T q. A few columns of S lie in the L1 cache and are read and written
// once a token: the update of a token and the products of the next one are one pass. The sum over
// the keys has one order, so the bits depend neither on how rows are cut nor on threads. The
// chunked form of the rule (products of matrices) has not been tried.
#pragma once

#include "decoder/head_states.h"
#include "simd/kernel_levels.h"

namespace lmdecode::decoder {

// rows: q, k, v, z, b, a. gates: g, beta of value heads, k q of key heads. gamma: [value_size].
struct DeltaRuleParams : HeadStatesParams {
  int64_t gate_stride() const { return 2 * config.value_heads + config.key_heads; }
  const float* queries(int64_t row) const { return rows + row * row_stride; }
  const float* keys(int64_t row) const { return queries(row) + config.key_heads * config.key_size; }
  const float* values(int64_t row) const { return keys(row) + config.key_heads * config.key_size; }
  const float* output_gates(int64_t row) const { return queries(row) + config.channels(); }
};

constexpr float kLengthEpsilon = 1e-6f;  // added to the squared length of queries and keys

}  // namespace lmdecode::decoder

// delta_rule_keys: queries and keys of rows to length 1, queries by key_size^-1/2, and their
// products. delta_rule: of parts of [begin, end), which are (value head, kStateColumns columns),
// all segments. delta_rule_norm: out = rms_norm(out) silu(z) of rows.
LMD_DECLARE_KERNELS(decoder,
                    void delta_rule_keys(const DeltaRuleParams& params, int64_t begin, int64_t end);
                    void delta_rule(const DeltaRuleParams& params, int64_t begin, int64_t end);
                    void delta_rule_norm(const DeltaRuleParams& params, int64_t begin,
                                         int64_t end);)
