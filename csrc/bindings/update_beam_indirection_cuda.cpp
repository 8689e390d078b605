// update_beam_indirection_ on CUDA tensors.
#include "bindings/cuda_launch.h"
#include "bindings/update_beam_indirection.h"

namespace lmdecode::kv_cache {
namespace {

void update_beam_indirection(const Tensor& indirection, const Tensor& parents, int64_t length,
                             const std::optional<Tensor>& length_rows) {
  const BeamIndirectionParams params =
      beam_indirection_params(indirection, parents, length, length_rows);
  const LaunchStream stream(kIndirectionOp, "parents", parents);
  update_beam_indirection_cuda(params, stream.get());
}

}  // namespace
}  // namespace lmdecode::kv_cache

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  m.impl("update_beam_indirection_", TORCH_BOX(&lmdecode::kv_cache::update_beam_indirection));
}
