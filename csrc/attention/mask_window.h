// Detects a window in a full mask.
#pragma once

#include "attention/sliding_window_attention.h"

namespace lmdecode::attention {

struct MaskWindow {
  bool found = false;
  int64_t window = kUnlimited;
  int64_t window_right = kUnlimited;
};

// The window that hides exactly the keys that the mask hides, where the last query has the position
// of the last key. One pass over the whole mask, on torch's threads, which ends early if there is
// no window. A few rows do not suffice: those of packed documents look the same. A mask that adds
// anything but zero to the score of a visible key is not a window.
MaskWindow find_mask_window(const SlidingWindowAttentionParams& params);

}  // namespace lmdecode::attention
