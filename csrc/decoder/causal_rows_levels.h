// The kernels of causal_rows.h at every level, and the last of the logits:
//
//   soft_cap: values [size] = cap * tanh(values * scale / cap), or where cap is 0 values * scale.
#pragma once

#include "decoder/causal_rows.h"
#include "simd/kernel_levels.h"

LMD_DECLARE_KERNELS(decoder,
                    void causal_rows(const CausalRowsParams& params, int64_t begin, int64_t end);
                    void convert_rows(const ConvertRowsParams& params, int64_t begin, int64_t end);
                    void soft_cap(float* values, int64_t size, float scale, float cap);)
