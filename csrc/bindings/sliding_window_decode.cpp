// sliding_window_decode on CPU tensors.
#include "bindings/sliding_window_decode.h"

namespace lmdecode {
namespace {

void run(const SlidingWindowAttentionParams& params, const Tensor&) {
  sliding_window_decode_cpu(params);
}

}  // namespace
}  // namespace lmdecode

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  using namespace lmdecode;
  m.impl("sliding_window_decode", TORCH_BOX((&SlidingWindowDecodeOp<run, NoGuard>::call)));
}
