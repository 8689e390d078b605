// The KV cache ops on CPU tensors.
#include "bindings/kv_cache.h"

namespace lmdecode {
namespace {

void reorder_cache(const std::vector<Tensor>& tensors, const Tensor& parents, int64_t batch_dim,
                   std::optional<int64_t> length_dim, std::optional<int64_t> length) {
  const ReorderArguments arguments(tensors, parents, batch_dim, length_dim, length);
  const ReorderCacheParams params = arguments.params();
  for (int64_t row = 0; row < params.parents.rows; ++row) {
    const int64_t parent = params.parents.at(row);
    if (!params.parents.contains(parent)) {
      fail(kReorderOp, "parents[", row, "] is ", parent, "; expected 0 to ",
           params.parents.rows - 1);
    }
  }
  reorder_cache_cpu(params);
}

}  // namespace
}  // namespace lmdecode

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("reorder_cache_", TORCH_BOX(&lmdecode::reorder_cache));
}
