// The CPU kernels of the attention of a step at every level.
#pragma once

#include <cstdint>

#include "decoder/step_attention.h"
#include "simd/kernel_levels.h"

LMD_DECLARE_KERNELS(decoder, void self_attention_items(const SelfAttentionParams& params,
                                                       int64_t begin, int64_t end, void* memory);
                    void cross_attention_items(const CrossAttentionParams& params, int64_t begin,
                                               int64_t end, void* memory);
                    int64_t step_attention_scratch(const AttentionShape& shape, int64_t positions);)
