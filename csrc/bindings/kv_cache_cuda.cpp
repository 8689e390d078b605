// The KV cache ops on CUDA tensors.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "bindings/kv_cache.h"

namespace lmdecode {
namespace {

void reorder_cache(const std::vector<Tensor>& tensors, const Tensor& parents, int64_t batch_dim,
                   std::optional<int64_t> length_dim, std::optional<int64_t> length) {
  const ReorderArguments arguments(tensors, parents, batch_dim, length_dim, length);
  if (!parents.is_cuda()) {
    fail(kReorderOp, "parents is on ", device_name(parents), "; expected the device of tensors");
  }
  const torch::stable::accelerator::DeviceGuard guard(parents.get_device_index());
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_get_current_cuda_stream(parents.get_device_index(), &stream));
  reorder_cache_cuda(arguments.params(), stream);
}

}  // namespace
}  // namespace lmdecode

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  m.impl("reorder_cache_", TORCH_BOX(&lmdecode::reorder_cache));
}
