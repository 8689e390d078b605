// decoder_cross_cache_ on CUDA tensors.
#include "bindings/decoder_step_checks_cuda.h"

namespace lmdecode::decoder {
namespace {

void cross_cache(const Tensor& key_value, const Tensor& keys, const Tensor& values) {
  const char* const op = "decoder_cross_cache_";
  check_rank(op, "key_value", key_value, 5, "[requests, length, 2, heads, head size]");
  check_rank(op, "keys", keys, 4, "[requests, heads, padded head, source]");
  const CudaArguments arguments(op, "key_value", key_value);
  StepCrossCacheParams p;
  p.dtype = float_dtype(op, "key_value", key_value);
  p.requests = key_value.size(0);
  p.length = key_value.size(1);
  p.source = keys.size(3);
  check_source(op, p.source);
  const int64_t heads = key_value.size(3), head_size = key_value.size(4);
  if (p.length > p.source) {
    fail(op, "key_value has ", p.length, " positions; expected at most ", p.source,
         ", those of keys");
  }
  p.shape = {heads, head_size, 1.0f, 0.0f};
  const ScalarType type = key_value.scalar_type();
  const int64_t padded = p.shape.padded_head();
  p.key_value = arguments.get<const void>("key_value", key_value, type,
                                          {p.requests, p.length, 2, heads, head_size});
  p.keys = arguments.get_cache<void>("keys", keys, type, {p.requests, heads, padded, p.source});
  p.values =
      arguments.get_cache<void>("values", values, type, {p.requests, heads, p.source, padded});
  const CudaGuard guard(key_value);
  decoder_cross_cache_cuda(p, current_cuda_stream(key_value));
}

}  // namespace
}  // namespace lmdecode::decoder

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  m.impl("decoder_cross_cache_", TORCH_BOX(&lmdecode::decoder::cross_cache));
}
