// decoder_self_attention_ on CUDA tensors.
#include "bindings/decoder_step_checks_cuda.h"

namespace lmdecode::decoder {
namespace {

void self_attention(const Tensor& qkv, const Tensor& keys, const Tensor& values,
                    const Tensor& table, const Tensor& positions, const OptionalTensor& bias,
                    double scale, double denominator_epsilon, const Tensor& out) {
  const char* const op = "decoder_self_attention_";
  check_rank(op, "qkv", qkv, 4, "[rows, 3, heads, head size]");
  check_rank(op, "keys", keys, 4, "[rows, heads, capacity, padded head]");
  const CudaArguments arguments(op, "qkv", qkv);
  StepSelfAttentionParams p;
  p.dtype = float_dtype(op, "qkv", qkv);
  p.rows = qkv.size(0);
  p.capacity = keys.size(2);
  p.shape = {qkv.size(2), qkv.size(3), static_cast<float>(scale),
             static_cast<float>(denominator_epsilon)};
  const ScalarType type = qkv.scalar_type();
  const int64_t heads = p.shape.heads, head_size = p.shape.head_size;
  const auto cache = {p.rows, heads, p.capacity, p.shape.padded_head()};
  p.qkv = arguments.get<const void>("qkv", qkv, type, {p.rows, 3, heads, head_size});
  p.out = arguments.get<void>("out", out, type, {p.rows, heads, head_size});
  p.keys = arguments.get_cache<void>("keys", keys, type, cache);
  p.values = arguments.get_cache<void>("values", values, type, cache);
  p.table = arguments.get<const int32_t>("table", table, ScalarType::Int, {p.rows, p.capacity});
  p.positions = arguments.get<const int32_t>("positions", positions, ScalarType::Int, {p.rows});
  p.bias = arguments.get_or_null<const float>("bias", bias, ScalarType::Float, {heads, -1});
  if (bias) {
    p.bias_stride = bias->size(1);
    if (p.bias_stride < p.capacity) {
      fail(op, "bias has ", p.bias_stride, " distances; expected at least ", p.capacity,
           ", the capacity of keys");
    }
  }
  const CudaGuard guard(qkv);
  decoder_self_attention_cuda(p, current_cuda_stream(qkv));
}

}  // namespace
}  // namespace lmdecode::decoder

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  m.impl("decoder_self_attention_", TORCH_BOX(&lmdecode::decoder::self_attention));
}
