// top_k_top_p_sample on CUDA tensors.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "bindings/sampling.h"

namespace lmdecode {
namespace {

void run(const TopKTopPSampleParams& params, const Tensor& logits) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_get_current_cuda_stream(logits.get_device_index(), &stream));
  top_k_top_p_sample_cuda(params, stream);
}

struct Guard {
  explicit Guard(const Tensor& logits) : guard(logits.get_device_index()) {}
  torch::stable::accelerator::DeviceGuard guard;
};

using Op = SampleOp<run, Guard>;

}  // namespace
}  // namespace lmdecode

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  m.impl("top_k_top_p_sample", TORCH_BOX(&lmdecode::Op::call));
  m.impl("top_k_top_p_sample.out", TORCH_BOX(&lmdecode::Op::call_out));
}
