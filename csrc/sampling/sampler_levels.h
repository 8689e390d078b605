// The CPU kernel of a sampler's step at every level.
#pragma once

#include <cstdint>

#include "sampling/sampler_verify.h"
#include "simd/kernel_levels.h"

LMD_DECLARE_KERNELS(sampling, void sampler_step_rows(const SamplerStepParams& params, int64_t begin,
                                                     int64_t end, void* workspace);
                    void sampler_verify_rows(const SamplerVerifyParams& params, int64_t begin,
                                             int64_t end, void* workspace);)
