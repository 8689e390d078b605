// The CPU kernels of sliding_window_decode at every level: parts of keys, then heads of parts.
#pragma once

#include <cstdint>

#include "attention/sliding_window_decode.h"
#include "simd/kernel_levels.h"

LMD_DECLARE_KERNELS(attention,
                    void sliding_window_decode_parts(const SlidingWindowAttentionParams& params,
                                                     const DecodePart* parts,
                                                     const DecodePartials& partials, int64_t begin,
                                                     int64_t end, void* workspace);
                    void sliding_window_decode_heads(const SlidingWindowAttentionParams& params,
                                                     const DecodeHead* heads,
                                                     const DecodePartials& partials, int64_t begin,
                                                     int64_t end);)
