// What the greedy choice of a token needs of a row of logits, at every level.
#pragma once

#include <cstdint>

#include "simd/kernel_levels.h"

LMD_DECLARE_KERNELS(beam, float largest_value(const float* values, int64_t size);
                    double sum_of_exponentials(const float* values, int64_t size, float top);
                    int64_t first_place(const float* values, int64_t size, float value);)
