// sliding_window_attention on either device.
#include "attention/sliding_window_attention.h"

#include "bindings/attention_checks.h"
#include "bindings/device.h"

namespace lmdecode::attention {
namespace {

std::tuple<Tensor, Tensor> attend(
    const Tensor& q, const Tensor& k, const Tensor& v, int64_t window, int64_t window_right,
    double scale, double softcap, const OptionalTensor& sinks, const OptionalTensor& alibi_slopes,
    const OptionalTensor& q_positions, const OptionalTensor& kv_lengths,
    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_kv,
    const OptionalTensor& attn_mask, bool true_is_visible, const OptionalTensor& key_padding_mask,
    const OptionalTensor& block_table, const OptionalTensor& indirection, bool return_lse) {
  AttentionArguments arguments(
      "sliding_window_attention", q, k, v, cu_seqlens_q, cu_seqlens_kv, attn_mask, true_is_visible,
      {window, window_right, scale, softcap, sinks, alibi_slopes, q_positions, kv_lengths,
       key_padding_mask, block_table, indirection});
  const OnDevice device(q);
  std::tuple<Tensor, Tensor> outputs = arguments.make_outputs(return_lse);
  if constexpr (kIsCuda) {
    sliding_window_attention_cuda(arguments.p, device.stream());
  } else {
    sliding_window_attention_cpu(arguments.p);
  }
  return outputs;
}

}  // namespace
}  // namespace lmdecode::attention

LMD_OPS(m) { m.impl("sliding_window_attention", TORCH_BOX(&lmdecode::attention::attend)); }
