// sliding_window_decode on CUDA tensors.
#include "bindings/cuda_stream.h"
#include "bindings/sliding_window_decode.h"

namespace lmdecode::attention {
namespace {

void decode(const SlidingWindowAttentionParams& params, const Tensor& q) {
  Tensor workspace =
      new_tensor(q, {sliding_window_decode_cuda_workspace(params)}, ScalarType::Float);
  sliding_window_decode_cuda(params, workspace.mutable_data_ptr<float>(), current_cuda_stream(q));
}

}  // namespace
}  // namespace lmdecode::attention

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  using namespace lmdecode;
  using namespace lmdecode::attention;
  m.impl("sliding_window_decode", TORCH_BOX((&SlidingWindowDecodeOp<decode, CudaGuard>::call)));
}
