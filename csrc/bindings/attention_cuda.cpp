// The attention ops on CUDA tensors.
#include "bindings/attention.h"
#include "bindings/cuda_stream.h"

namespace lmdecode::attention {
namespace {

void attend(const SlidingWindowAttentionParams& params, const Tensor& q) {
  sliding_window_attention_cuda(params, current_cuda_stream(q));
}

void decode(const SlidingWindowAttentionParams& params, const Tensor& q) {
  Tensor workspace =
      new_tensor(q, {sliding_window_decode_cuda_workspace(params)}, ScalarType::Float);
  sliding_window_decode_cuda(params, workspace.mutable_data_ptr<float>(), current_cuda_stream(q));
}

void merge(const MergeAttentionStatesParams& params, const Tensor& o1) {
  merge_attention_states_cuda(params, current_cuda_stream(o1));
}

}  // namespace
}  // namespace lmdecode::attention

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  using namespace lmdecode;
  using namespace lmdecode::attention;
  m.impl("sliding_window_attention",
         TORCH_BOX((&SlidingWindowAttentionOp<attend, CudaGuard>::call)));
  m.impl("sliding_window_decode", TORCH_BOX((&SlidingWindowDecodeOp<decode, CudaGuard>::call)));
  m.impl("merge_attention_states", TORCH_BOX((&MergeAttentionStatesOp<merge, CudaGuard>::call)));
}
