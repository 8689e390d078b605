// sliding_window_attention on CUDA tensors.
#include "bindings/cuda_stream.h"
#include "bindings/sliding_window_attention.h"

namespace lmdecode::attention {
namespace {

void attend(const SlidingWindowAttentionParams& params, const Tensor& q) {
  sliding_window_attention_cuda(params, current_cuda_stream(q));
}

}  // namespace
}  // namespace lmdecode::attention

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  using namespace lmdecode;
  using namespace lmdecode::attention;
  m.impl("sliding_window_attention",
         TORCH_BOX((&SlidingWindowAttentionOp<attend, CudaGuard>::call)));
}
