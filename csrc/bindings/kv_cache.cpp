// The KV cache ops on CPU tensors.
#include "bindings/kv_cache.h"

#include "bindings/kv_cache_indirection.h"

namespace lmdecode {
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

}  // namespace
}  // namespace lmdecode

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("reorder_cache_", TORCH_BOX(&lmdecode::reorder_cache));
  m.impl("update_beam_indirection_", TORCH_BOX(&lmdecode::update_beam_indirection));
}
