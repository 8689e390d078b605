// update_beam_indirection_ on CPU tensors.
#include "bindings/update_beam_indirection.h"

namespace lmdecode::kv_cache {
namespace {

void update_beam_indirection(const Tensor& indirection, const Tensor& parents, int64_t length,
                             const std::optional<Tensor>& length_rows) {
  const BeamIndirectionParams params =
      beam_indirection_params(indirection, parents, length, length_rows);
  check_parents(kIndirectionOp, params.parents);
  check_lengths(params);
  update_beam_indirection_cpu(params);
}

}  // namespace
}  // namespace lmdecode::kv_cache

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("update_beam_indirection_", TORCH_BOX(&lmdecode::kv_cache::update_beam_indirection));
}
