// sliding_window_decode on CPU tensors.
#include "bindings/sliding_window_decode.h"

namespace lmdecode::attention {
namespace {

void run(const SlidingWindowAttentionParams& params, const Tensor&) {
  sliding_window_decode_cpu(params);
}

}  // namespace
}  // namespace lmdecode::attention

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  using namespace lmdecode;
  using namespace lmdecode::attention;
  m.impl("sliding_window_decode", TORCH_BOX((&SlidingWindowDecodeOp<run, NoGuard>::call)));
}
