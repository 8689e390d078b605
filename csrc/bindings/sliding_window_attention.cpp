// sliding_window_attention on CPU tensors.
#include "bindings/sliding_window_attention.h"

namespace lmdecode::attention {
namespace {

void run(const SlidingWindowAttentionParams& params, const Tensor&) {
  sliding_window_attention_cpu(params);
}

}  // namespace
}  // namespace lmdecode::attention

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  using namespace lmdecode;
  using namespace lmdecode::attention;
  m.impl("sliding_window_attention", TORCH_BOX((&SlidingWindowAttentionOp<run, NoGuard>::call)));
}
