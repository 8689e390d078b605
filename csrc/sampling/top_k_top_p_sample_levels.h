// The CPU kernel of top_k_top_p_sample at every level.
#pragma once

#include <cstdint>

#include "sampling/top_k_top_p_sample.h"
#include "simd/kernel_levels.h"

LMD_DECLARE_KERNELS(sampling,
                    void top_k_top_p_sample_rows(const TopKTopPSampleParams& params, int64_t begin,
                                                 int64_t end, void* workspace);)
