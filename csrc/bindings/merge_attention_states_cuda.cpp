// merge_attention_states on CUDA tensors.
#include "bindings/cuda_stream.h"
#include "bindings/merge_attention_states.h"

namespace lmdecode::attention {
namespace {

void merge(const MergeAttentionStatesParams& params, const Tensor& o1) {
  merge_attention_states_cuda(params, current_cuda_stream(o1));
}

}  // namespace
}  // namespace lmdecode::attention

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  using namespace lmdecode;
  using namespace lmdecode::attention;
  m.impl("merge_attention_states", TORCH_BOX((&MergeAttentionStatesOp<merge, CudaGuard>::call)));
}
