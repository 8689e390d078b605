// The CPU kernel of merge_attention_states at every level.
#pragma once

#include <cstdint>

#include "attention/merge_attention_states.h"
#include "simd/kernel_levels.h"

LMD_DECLARE_KERNELS(attention,
                    void merge_attention_states_rows(const MergeAttentionStatesParams& params,
                                                     int64_t begin, int64_t end);)
