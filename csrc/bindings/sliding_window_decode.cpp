// sliding_window_decode on either device.
#include "attention/sliding_window_decode.h"

#include "bindings/attention_checks.h"
#include "bindings/device.h"

namespace lmdecode::attention {
namespace {

std::tuple<Tensor, Tensor> decode(const Tensor& q, const Tensor& k, const Tensor& v, int64_t window,
                                  int64_t window_right, double scale, double softcap,
                                  const OptionalTensor& sinks, const OptionalTensor& alibi_slopes,
                                  const OptionalTensor& q_positions,
                                  const OptionalTensor& kv_lengths,
                                  const OptionalTensor& key_padding_mask,
                                  const OptionalTensor& block_table,
                                  const OptionalTensor& indirection, bool return_lse) {
  AttentionArguments arguments(
      "sliding_window_decode", q, k, v, {}, {}, {}, false,
      {window, window_right, scale, softcap, sinks, alibi_slopes, q_positions, kv_lengths,
       key_padding_mask, block_table, indirection});
  const OnDevice device(q);
  std::tuple<Tensor, Tensor> outputs = arguments.make_outputs(return_lse);
  if constexpr (kIsCuda) {
    Tensor workspace =
        new_tensor(q, {sliding_window_decode_cuda_workspace(arguments.p)}, ScalarType::Float);
    sliding_window_decode_cuda(arguments.p, workspace.mutable_data_ptr<float>(), device.stream());
  } else {
    sliding_window_decode_cpu(arguments.p);
  }
  return outputs;
}

}  // namespace
}  // namespace lmdecode::attention

LMD_OPS(m) { m.impl("sliding_window_decode", TORCH_BOX(&lmdecode::attention::decode)); }
