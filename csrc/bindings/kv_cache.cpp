// The KV cache ops on CPU tensors.
#include "bindings/kv_cache.h"

#include "bindings/kv_cache_indirection.h"
#include "bindings/kv_cache_ring.h"

namespace lmdecode::kv_cache {
namespace {

void reorder_cache(const std::vector<Tensor>& tensors, const Tensor& parents, int64_t batch_dim,
                   std::optional<int64_t> length_dim, std::optional<int64_t> length) {
  const ReorderArguments arguments(tensors, parents, batch_dim, length_dim, length);
  const ReorderCacheParams params = arguments.params();
  check_parents(kReorderOp, params.parents);
  reorder_cache_cpu(params);
}

void update_beam_indirection(const Tensor& indirection, const Tensor& parents, int64_t length,
                             const std::optional<Tensor>& length_rows) {
  const BeamIndirectionParams params =
      beam_indirection_params(indirection, parents, length, length_rows);
  check_parents(kIndirectionOp, params.parents);
  check_lengths(params);
  update_beam_indirection_cpu(params);
}

void ring_cache_append(const Tensor& keys, const Tensor& values, const Tensor& k, const Tensor& v,
                       int64_t position, const std::optional<Tensor>& position_rows,
                       int64_t num_sink_tokens) {
  const RingAppendArguments arguments(keys, values, k, v, position, position_rows, num_sink_tokens);
  arguments.check_positions();
  ring_cache_append_cpu(arguments.p);
}

}  // namespace
}  // namespace lmdecode::kv_cache

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("reorder_cache_", TORCH_BOX(&lmdecode::kv_cache::reorder_cache));
  m.impl("update_beam_indirection_", TORCH_BOX(&lmdecode::kv_cache::update_beam_indirection));
  m.impl("ring_cache_append_", TORCH_BOX(&lmdecode::kv_cache::ring_cache_append));
}
