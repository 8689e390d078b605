// The CPU kernels of the norms at every level.
#pragma once

#include <cstdint>

#include "linear/norms.h"
#include "simd/kernel_levels.h"

LMD_DECLARE_KERNELS(linear,
                    void layer_norm_rows(const NormParams& params, int64_t begin, int64_t end);
                    void rms_norm_rows(const NormParams& params, int64_t begin, int64_t end);)
