// sliding_window_decode on either device.
#pragma once

#include "attention/sliding_window_decode.h"
#include "bindings/attention_checks.h"

namespace lmdecode::attention {

// The op on one device, which `run(params, q)` launches, with the device of q selected by Guard.
template <auto run, class Guard>
struct SlidingWindowDecodeOp {
  static std::tuple<Tensor, Tensor> call(
      const Tensor& q, const Tensor& k, const Tensor& v, int64_t window, int64_t window_right,
      double scale, double softcap, const OptionalTensor& sinks, const OptionalTensor& alibi_slopes,
      const OptionalTensor& q_positions, const OptionalTensor& kv_lengths,
      const OptionalTensor& key_padding_mask, const OptionalTensor& block_table,
      const OptionalTensor& indirection, bool return_lse) {
    AttentionArguments arguments(
        "sliding_window_decode", q, k, v, {}, {}, {}, false,
        {window, window_right, scale, softcap, sinks, alibi_slopes, q_positions, kv_lengths,
         key_padding_mask, block_table, indirection});
    const Guard guard(q);
    std::tuple<Tensor, Tensor> outputs = arguments.make_outputs(return_lse);
    run(arguments.p, q);
    return outputs;
  }
};

}  // namespace lmdecode::attention
