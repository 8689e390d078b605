// reorder_cache_ on CPU tensors.
#include "bindings/reorder_cache.h"

namespace lmdecode::kv_cache {
namespace {

void reorder_cache(const std::vector<Tensor>& tensors, const Tensor& parents, int64_t batch_dim,
                   std::optional<int64_t> length_dim, std::optional<int64_t> length) {
  const ReorderArguments arguments(tensors, parents, batch_dim, length_dim, length);
  const ReorderCacheParams params = arguments.params();
  check_parents(kReorderOp, params.parents);
  reorder_cache_cpu(params);
}

}  // namespace
}  // namespace lmdecode::kv_cache

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("reorder_cache_", TORCH_BOX(&lmdecode::kv_cache::reorder_cache));
}
