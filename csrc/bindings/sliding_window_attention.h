// sliding_window_attention on either device.
#pragma once

#include "bindings/attention_checks.h"

namespace lmdecode::attention {

// The op on one device, which `run(params, q)` launches, with the device of q selected by Guard.
template <auto run, class Guard>
struct SlidingWindowAttentionOp {
  static std::tuple<Tensor, Tensor> call(
      const Tensor& q, const Tensor& k, const Tensor& v, int64_t window, int64_t window_right,
      double scale, double softcap, const OptionalTensor& sinks, const OptionalTensor& alibi_slopes,
      const OptionalTensor& q_positions, const OptionalTensor& kv_lengths,
      const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_kv,
      const OptionalTensor& attn_mask, bool true_is_visible, const OptionalTensor& key_padding_mask,
      const OptionalTensor& block_table, const OptionalTensor& indirection, bool return_lse) {
    AttentionArguments arguments(
        "sliding_window_attention", q, k, v, cu_seqlens_q, cu_seqlens_kv, attn_mask,
        true_is_visible,
        {window, window_right, scale, softcap, sinks, alibi_slopes, q_positions, kv_lengths,
         key_padding_mask, block_table, indirection});
    const Guard guard(q);
    std::tuple<Tensor, Tensor> outputs = arguments.make_outputs(return_lse);
    run(arguments.p, q);
    return outputs;
  }
};

}  // namespace lmdecode::attention
