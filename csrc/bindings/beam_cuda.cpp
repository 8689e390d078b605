// The beam ops on CUDA tensors.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "bindings/beam.h"

namespace lmdecode {
namespace {

void run(const LogSoftmaxTopKParams& params, const LogitsProcessors* processors,
         const Tensor& logits) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_get_current_cuda_stream(logits.get_device_index(), &stream));
  if (processors == nullptr) return log_softmax_top_k_cuda(params, nullptr, nullptr, stream);
  Tensor values = new_tensor(logits, {params.rows, params.vocab}, ScalarType::Float);
  log_softmax_top_k_cuda(params, processors, values.mutable_data_ptr<float>(), stream);
}

struct Guard {
  explicit Guard(const Tensor& logits) : guard(logits.get_device_index()) {}
  torch::stable::accelerator::DeviceGuard guard;
};

}  // namespace
}  // namespace lmdecode

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  using namespace lmdecode;
  m.impl("log_softmax_top_k", TORCH_BOX((&LogSoftmaxTopKOp<run, Guard>::call)));
  m.impl("log_softmax_top_k.processed", TORCH_BOX((&LogSoftmaxTopKOp<run, Guard>::processed)));
}
