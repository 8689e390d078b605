// Recognises a window in a mask that was given in full.
#pragma once

#include "attention/sliding_window_attention.h"

namespace lmdecode::attention {

struct MaskWindow {
  bool found = false;
  int64_t window = kUnlimited;
  int64_t window_right = kUnlimited;
};

// The window that hides exactly what the mask hides, for queries whose last stands beside the last
// key. One pass over the whole mask, by torch's threads, that ends early where there is none: a few
// rows do not tell, those of packed documents look the same. A mask that adds anything but zero to
// the score of a visible key is no window.
MaskWindow find_mask_window(const SlidingWindowAttentionParams& params);

}  // namespace lmdecode::attention
