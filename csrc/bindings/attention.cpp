// The attention ops on CPU tensors.
#include "bindings/attention.h"

namespace lmdecode::attention {
namespace {

void attend(const SlidingWindowAttentionParams& params, const Tensor&) {
  sliding_window_attention_cpu(params);
}

void decode(const SlidingWindowAttentionParams& params, const Tensor&) {
  sliding_window_decode_cpu(params);
}

void merge(const MergeAttentionStatesParams& params, const Tensor&) {
  merge_attention_states_cpu(params);
}

struct NoGuard {
  explicit NoGuard(const Tensor&) {}
};

}  // namespace
}  // namespace lmdecode::attention

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  using namespace lmdecode::attention;
  m.impl("sliding_window_attention", TORCH_BOX((&SlidingWindowAttentionOp<attend, NoGuard>::call)));
  m.impl("sliding_window_decode", TORCH_BOX((&SlidingWindowDecodeOp<decode, NoGuard>::call)));
  m.impl("merge_attention_states", TORCH_BOX((&MergeAttentionStatesOp<merge, NoGuard>::call)));
}
