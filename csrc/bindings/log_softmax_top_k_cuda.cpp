// log_softmax_top_k on CUDA tensors.
#include "bindings/cuda_stream.h"
#include "bindings/log_softmax_top_k.h"

namespace lmdecode::beam {
namespace {

void run(const LogSoftmaxTopKParams& params, const LogitsProcessors* processors,
         const Tensor& logits) {
  void* const stream = current_cuda_stream(logits);
  if (processors == nullptr) return log_softmax_top_k_cuda(params, nullptr, nullptr, stream);
  Tensor values = new_tensor(logits, {params.rows, params.vocab}, ScalarType::Float);
  log_softmax_top_k_cuda(params, processors, values.mutable_data_ptr<float>(), stream);
}

}  // namespace
}  // namespace lmdecode::beam

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  using namespace lmdecode;
  using namespace lmdecode::beam;
  using Op = LogSoftmaxTopKOp<run, CudaGuard>;
  m.impl("log_softmax_top_k", TORCH_BOX(&Op::call));
  m.impl("log_softmax_top_k.processed", TORCH_BOX(&Op::processed));
  m.impl("log_softmax_top_k.trie", TORCH_BOX(&Op::held_to_trie));
}
