// Arguments of merge_attention_states to kernel parameters: shared by the CPU and the CUDA library.
#pragma once

#include "attention/merge_attention_states.h"
#include "bindings/tensor_checks.h"

namespace lmdecode::attention {

constexpr const char* kMergeAttentionStatesOp = "merge_attention_states";

inline AttentionState attention_state(const char* out_name, const Tensor& out, const char* lse_name,
                                      const Tensor& lse, const Tensor& first) {
  const char* op = kMergeAttentionStatesOp;
  check_same_device(op, out_name, out, "o1", first);
  check_same_device(op, lse_name, lse, "o1", first);
  check_dtype(op, out_name, out, dtype_of(first));
  check_dtype(op, lse_name, lse, ScalarType::Float);
  const bool ragged = first.dim() == 3;
  bool same = out.dim() == first.dim();
  for (int64_t i = 0; same && i < first.dim(); ++i) same = out.size(i) == first.size(i);
  if (!same) {
    fail(op, out_name, " has shape ", shape_text(out), "; expected ", shape_text(first),
         ", that of o1");
  }
  AttentionState state;
  if (ragged) {
    check_shape(op, lse_name, lse, first.size(1), first.size(0));
    state.out_strides = {0, out.stride(1), out.stride(0), out.stride(2)};
    state.lse_strides = {0, lse.stride(0), lse.stride(1), 0};
  } else {
    check_rank(op, lse_name, lse, 3, "[batch, heads, tokens]");
    for (int64_t i = 0; i < 3; ++i) {
      if (lse.size(i) != first.size(i)) {
        fail(op, lse_name, " has shape ", shape_text(lse), "; expected [", first.size(0), ", ",
             first.size(1), ", ", first.size(2), "]");
      }
    }
    state.out_strides = {out.stride(0), out.stride(1), out.stride(2), out.stride(3)};
    state.lse_strides = {lse.stride(0), lse.stride(1), lse.stride(2), 0};
  }
  state.out = out.const_data_ptr();
  state.lse = lse.const_data_ptr<float>();
  return state;
}

// The op on one device, which `run(params, o1)` launches, with the device of o1 selected by Guard.
template <auto run, class Guard>
struct MergeAttentionStatesOp {
  static std::tuple<Tensor, Tensor> call(const Tensor& o1, const Tensor& lse1, const Tensor& o2,
                                         const Tensor& lse2) {
    const char* op = kMergeAttentionStatesOp;
    MergeAttentionStatesParams p;
    p.dtype = float_dtype(op, "o1", o1);
    const bool ragged = o1.dim() == 3;
    if (!ragged) check_rank(op, "o1", o1, 4, "[batch, heads, tokens, size], or 3 of ragged ones");
    p.states[0] = attention_state("o1", o1, "lse1", lse1, o1);
    p.states[1] = attention_state("o2", o2, "lse2", lse2, o1);
    p.sequences = ragged ? 1 : o1.size(0);
    p.heads = o1.size(1);
    p.tokens = ragged ? o1.size(0) : o1.size(2);
    p.size = o1.size(ragged ? 2 : 3);
    const Guard guard(o1);
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
    run(p, o1);
    return {out, lse};
  }
};

}  // namespace lmdecode::attention
