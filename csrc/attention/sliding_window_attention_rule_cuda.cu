// Launches sliding_window_attention with a rule for scores.
#include "attention/attention_tile_launch.h"

namespace lmdecode::attention {

template <class T>
void launch_attention_tiles_with_rule(const SlidingWindowAttentionParams& params, void* stream) {
  launch_attention_tiles<T, true>(params, stream);
}

template void launch_attention_tiles_with_rule<Half>(const SlidingWindowAttentionParams&, void*);
template void launch_attention_tiles_with_rule<BFloat16>(const SlidingWindowAttentionParams&,
                                                         void*);

}  // namespace lmdecode::attention
