// log_softmax_top_k on CPU tensors.
#include "bindings/log_softmax_top_k.h"

namespace lmdecode::beam {
namespace {

void run(const LogSoftmaxTopKParams& params, const LogitsProcessors* processors, const Tensor&) {
  log_softmax_top_k_cpu(params, processors);
}

using Op = LogSoftmaxTopKOp<run, NoGuard>;

}  // namespace
}  // namespace lmdecode::beam

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  using namespace lmdecode;
  using namespace lmdecode::beam;
  m.impl("log_softmax_top_k", TORCH_BOX(&Op::call));
  m.impl("log_softmax_top_k.processed", TORCH_BOX(&Op::processed));
  m.impl("log_softmax_top_k.trie", TORCH_BOX(&Op::held_to_trie));
}
