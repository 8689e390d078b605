// ring_cache_append_ on CUDA tensors.
#include "bindings/cuda_launch.h"
#include "bindings/ring_cache_append.h"

namespace lmdecode::kv_cache {
namespace {

void ring_cache_append(const Tensor& keys, const Tensor& values, const Tensor& k, const Tensor& v,
                       int64_t position, const std::optional<Tensor>& position_rows,
                       int64_t num_sink_tokens) {
  const RingAppendArguments arguments(keys, values, k, v, position, position_rows, num_sink_tokens);
  const LaunchStream stream(kRingAppendOp, "keys", keys);
  ring_cache_append_cuda(arguments.p, stream.get());
}

}  // namespace
}  // namespace lmdecode::kv_cache

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  m.impl("ring_cache_append_", TORCH_BOX(&lmdecode::kv_cache::ring_cache_append));
}
