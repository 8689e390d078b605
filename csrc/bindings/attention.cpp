// The attention ops on CPU tensors.
#include "bindings/attention.h"

namespace lmdecode {
namespace {

void run(const SlidingWindowAttentionParams& params, const Tensor&) {
  sliding_window_attention_cpu(params);
}

struct NoGuard {
  explicit NoGuard(const Tensor&) {}
};

}  // namespace
}  // namespace lmdecode

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  using namespace lmdecode;
  m.impl("sliding_window_attention", TORCH_BOX((&SlidingWindowAttentionOp<run, NoGuard>::call)));
}
