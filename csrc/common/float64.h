// f64 functions of the C library, on the host or CUDA. Their bits differ: for results with a
// tolerance alone.
#pragma once

#include "common/host_device.h"

namespace lmdecode {

#if defined(__CUDA_ARCH__)
#define LMD_F64_FUNCTION(name) name
#else
#define LMD_F64_FUNCTION(name) __builtin_##name
#endif

LMD_HOST_DEVICE double exp_f64(double x) { return LMD_F64_FUNCTION(exp)(x); }
LMD_HOST_DEVICE double exp2_f64(double x) { return LMD_F64_FUNCTION(exp2)(x); }
LMD_HOST_DEVICE double natural_log_f64(double x) { return LMD_F64_FUNCTION(log)(x); }
LMD_HOST_DEVICE double log2_f64(double x) { return LMD_F64_FUNCTION(log2)(x); }

#undef LMD_F64_FUNCTION

}  // namespace lmdecode
