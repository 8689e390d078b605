// merge_attention_states on either device.
#include "attention/merge_attention_states.h"

#include "bindings/device.h"

namespace lmdecode::attention {
namespace {

constexpr const char* kOp = "merge_attention_states";

// first: o1; both have its shape and dtype.
AttentionState attention_state(const char* out_name, const Tensor& out, const char* lse_name,
                               const Tensor& lse, const Tensor& first) {
  const Arguments arguments(kOp, "o1", first);
  check_dtype(kOp, out_name, out, dtype_of(first));
  arguments.check_device(out_name, out);
  const auto sizes = first.sizes(), given = out.sizes();
  if (!std::equal(sizes.begin(), sizes.end(), given.begin(), given.end())) {
    fail(kOp, out_name, " has shape ", shape_text(out), "; expected ", shape_text(first),
         ", that of o1");
  }
  AttentionState state;
  state.out = out.const_data_ptr();
  if (first.dim() == 3) {
    state.lse = arguments.strided<const float>(lse_name, lse, {sizes[1], sizes[0]});
    state.out_strides = {0, out.stride(1), out.stride(0), out.stride(2)};
    state.lse_strides = {0, lse.stride(0), lse.stride(1), 0};
  } else {
    state.lse = arguments.strided<const float>(lse_name, lse, {sizes[0], sizes[1], sizes[2]});
    state.out_strides = {out.stride(0), out.stride(1), out.stride(2), out.stride(3)};
    state.lse_strides = {lse.stride(0), lse.stride(1), lse.stride(2), 0};
  }
  return state;
}

std::tuple<Tensor, Tensor> merge(const Tensor& o1, const Tensor& lse1, const Tensor& o2,
                                 const Tensor& lse2) {
  MergeAttentionStatesParams p;
  p.dtype = float_dtype(kOp, "o1", o1);
  const bool ragged = o1.dim() == 3;
  if (!ragged) check_rank(kOp, "o1", o1, 4, "[batch, heads, tokens, size], or 3 of ragged ones");
  p.states[0] = attention_state("o1", o1, "lse1", lse1, o1);
  p.states[1] = attention_state("o2", o2, "lse2", lse2, o1);
  p.sequences = ragged ? 1 : o1.size(0);
  p.heads = o1.size(1);
  p.tokens = ragged ? o1.size(0) : o1.size(2);
  p.size = o1.size(ragged ? 2 : 3);
  const OnDevice device(o1);
  Tensor out = ragged ? new_tensor(o1, {p.tokens, p.heads, p.size}, dtype_of(o1))
                      : new_tensor(o1, {p.sequences, p.heads, p.tokens, p.size}, dtype_of(o1));
  Tensor lse = ragged ? new_tensor(o1, {p.heads, p.tokens}, ScalarType::Float)
                      : new_tensor(o1, {p.sequences, p.heads, p.tokens}, ScalarType::Float);
  p.out = out.mutable_data_ptr();
  p.lse = lse.mutable_data_ptr<float>();
  const int64_t of_head = p.tokens * p.size;
  p.out_strides = ragged ? AttentionStrides{0, p.size, p.heads * p.size, 1}
                         : AttentionStrides{p.heads * of_head, of_head, p.size, 1};
  p.lse_strides = {p.heads * p.tokens, p.tokens, 1, 0};
  if constexpr (kIsCuda) {
    merge_attention_states_cuda(p, device.stream());
  } else {
    merge_attention_states_cpu(p);
  }
  return {out, lse};
}

}  // namespace
}  // namespace lmdecode::attention

LMD_OPS(m) { m.impl("merge_attention_states", TORCH_BOX(&lmdecode::attention::merge)); }
