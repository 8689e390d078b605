// top_k_top_p_sample on CUDA tensors.
#include "bindings/cuda_stream.h"
#include "bindings/sampling.h"

namespace lmdecode::sampling {
namespace {

void run(const TopKTopPSampleParams& params, const Tensor& logits) {
  top_k_top_p_sample_cuda(params, current_cuda_stream(logits));
}

using Op = SampleOp<run, CudaGuard>;

}  // namespace
}  // namespace lmdecode::sampling

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  m.impl("top_k_top_p_sample", TORCH_BOX(&lmdecode::sampling::Op::call));
  m.impl("top_k_top_p_sample.out", TORCH_BOX(&lmdecode::sampling::Op::call_out));
}
