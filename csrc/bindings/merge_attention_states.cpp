// merge_attention_states on CPU tensors.
#include "bindings/merge_attention_states.h"

namespace lmdecode::attention {
namespace {

void run(const MergeAttentionStatesParams& params, const Tensor&) {
  merge_attention_states_cpu(params);
}

}  // namespace
}  // namespace lmdecode::attention

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  using namespace lmdecode;
  using namespace lmdecode::attention;
  m.impl("merge_attention_states", TORCH_BOX((&MergeAttentionStatesOp<run, NoGuard>::call)));
}
