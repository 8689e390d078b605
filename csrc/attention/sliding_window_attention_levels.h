// The CPU kernel of sliding_window_attention at every level.
#pragma once

#include <cstdint>

#include "attention/sliding_window_attention.h"
#include "simd/kernel_levels.h"

LMD_DECLARE_KERNELS(attention,
                    void sliding_window_attention_tiles(const SlidingWindowAttentionParams& params,
                                                        const AttentionTile* tiles, int64_t begin,
                                                        int64_t end, int64_t most_rows,
                                                        void* workspace);)
