// decoder_cross_attention on CUDA tensors.
#include "bindings/decoder_step_checks_cuda.h"

namespace lmdecode::decoder {
namespace {

void cross_attention(const Tensor& queries, const Tensor& keys, const Tensor& values,
                     const Tensor& lengths, double scale, double denominator_epsilon,
                     const Tensor& out) {
  const char* const op = "decoder_cross_attention";
  check_rank(op, "queries", queries, 3, "[rows, heads, head size]");
  check_rank(op, "keys", keys, 4, "[requests, heads, padded head, source]");
  const CudaArguments arguments(op, "queries", queries);
  StepCrossAttentionParams p;
  p.dtype = float_dtype(op, "queries", queries);
  p.requests = keys.size(0);
  p.source = keys.size(3);
  check_source(op, p.source);
  const int64_t rows = queries.size(0), heads = queries.size(1), head_size = queries.size(2);
  if (p.requests == 0 ? rows != 0 : rows % p.requests != 0) {
    fail(op, "queries has ", rows, " rows; expected a multiple of the ", p.requests,
         " requests of keys");
  }
  p.request_rows = p.requests == 0 ? 0 : rows / p.requests;
  p.shape = {heads, head_size, static_cast<float>(scale), static_cast<float>(denominator_epsilon)};
  const ScalarType type = queries.scalar_type();
  const int64_t padded = p.shape.padded_head();
  p.queries = arguments.get<const void>("queries", queries, type, {rows, heads, head_size});
  p.out = arguments.get<void>("out", out, type, {rows, heads, head_size});
  p.keys =
      arguments.get_cache<const void>("keys", keys, type, {p.requests, heads, padded, p.source});
  p.values = arguments.get_cache<const void>("values", values, type,
                                             {p.requests, heads, p.source, padded});
  p.lengths = arguments.get<const int64_t>("lengths", lengths, ScalarType::Long, {p.requests});
  const CudaGuard guard(queries);
  decoder_cross_attention_cuda(p, current_cuda_stream(queries));
}

}  // namespace
}  // namespace lmdecode::decoder

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  m.impl("decoder_cross_attention", TORCH_BOX(&lmdecode::decoder::cross_attention));
}
