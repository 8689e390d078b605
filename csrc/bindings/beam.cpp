// The beam ops on CPU tensors.
#include "bindings/beam.h"

namespace lmdecode::beam {
namespace {

void run(const LogSoftmaxTopKParams& params, const LogitsProcessors* processors, const Tensor&) {
  log_softmax_top_k_cpu(params, processors);
}

struct NoGuard {
  explicit NoGuard(const Tensor&) {}
};

}  // namespace
}  // namespace lmdecode::beam

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  using namespace lmdecode::beam;
  m.impl("log_softmax_top_k", TORCH_BOX((&LogSoftmaxTopKOp<run, NoGuard>::call)));
  m.impl("log_softmax_top_k.processed", TORCH_BOX((&LogSoftmaxTopKOp<run, NoGuard>::processed)));
}
