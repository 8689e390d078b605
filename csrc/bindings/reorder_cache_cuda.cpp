// reorder_cache_ on CUDA tensors.
#include "bindings/cuda_launch.h"
#include "bindings/reorder_cache.h"

namespace lmdecode::kv_cache {
namespace {

void reorder_cache(const std::vector<Tensor>& tensors, const Tensor& parents, int64_t batch_dim,
                   std::optional<int64_t> length_dim, std::optional<int64_t> length) {
  const ReorderArguments arguments(tensors, parents, batch_dim, length_dim, length);
  const LaunchStream stream(kReorderOp, "parents", parents);
  reorder_cache_cuda(arguments.params(), stream.get());
}

}  // namespace
}  // namespace lmdecode::kv_cache

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  m.impl("reorder_cache_", TORCH_BOX(&lmdecode::kv_cache::reorder_cache));
}
