// The KV cache ops on CUDA tensors.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "bindings/kv_cache.h"
#include "bindings/kv_cache_indirection.h"

namespace lmdecode {
namespace {

// The current stream of the device that `parents` is on, which is the current one meanwhile.
class LaunchStream {
 public:
  LaunchStream(const char* op, const Tensor& parents)
      : guard_((check_is_cuda(op, parents), parents.get_device_index())) {
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_get_current_cuda_stream(parents.get_device_index(), &stream_));
  }
  void* get() const { return stream_; }

 private:
  static void check_is_cuda(const char* op, const Tensor& parents) {
    if (parents.is_cuda()) return;
    fail(op, "parents is on ", device_name(parents), "; expected the device of the cache");
  }

  const torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
};

void reorder_cache(const std::vector<Tensor>& tensors, const Tensor& parents, int64_t batch_dim,
                   std::optional<int64_t> length_dim, std::optional<int64_t> length) {
  const ReorderArguments arguments(tensors, parents, batch_dim, length_dim, length);
  const LaunchStream stream(kReorderOp, parents);
  reorder_cache_cuda(arguments.params(), stream.get());
}

void update_beam_indirection(const Tensor& indirection, const Tensor& parents, int64_t length,
                             const std::optional<Tensor>& length_rows) {
  const BeamIndirectionParams params =
      beam_indirection_params(indirection, parents, length, length_rows);
  const LaunchStream stream(kIndirectionOp, parents);
  update_beam_indirection_cuda(params, stream.get());
}

}  // namespace
}  // namespace lmdecode

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  m.impl("reorder_cache_", TORCH_BOX(&lmdecode::reorder_cache));
  m.impl("update_beam_indirection_", TORCH_BOX(&lmdecode::update_beam_indirection));
}
