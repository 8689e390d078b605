// sliding_window_attention on CPU tensors.
#include "bindings/sliding_window_attention.h"

namespace lmdecode {
namespace {

void run(const SlidingWindowAttentionParams& params, const Tensor&) {
  sliding_window_attention_cpu(params);
}

}  // namespace
}  // namespace lmdecode

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  using namespace lmdecode;
  m.impl("sliding_window_attention", TORCH_BOX((&SlidingWindowAttentionOp<run, NoGuard>::call)));
}
