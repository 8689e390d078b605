// The parts of packed_linear that are compiled for each level, and which of them a format takes.
#pragma once

#include "linear/packed_layout.h"
#include "simd/cpu_capability.h"

namespace lmdecode {

// Rows of x to be put into the form of LinearInput.
struct LinearInputRows {
  LinearFormat format;
  const float* x;  // [rows, in_features]
  int64_t row_stride;
  int64_t element_stride;
  int64_t in_features;
  char* rows;  // [rows, row_bytes], aligned to 64
  int64_t row_bytes;
  float* scales;  // kInt8: [rows]
};

struct LinearKernels {
  LinearTile (*tile)(LinearFormat format);
  // Panels [begin, end) with their scales and offsets.
  void (*pack)(const PackedLinearShape& shape, const float* weight, int64_t out_stride,
               int64_t in_stride, void* packed, int64_t begin, int64_t end);
  void (*prepare)(const LinearInputRows& input, int64_t begin, int64_t end);
  // Panels [begin, end), at most kRowBlock rows.
  void (*multiply)(const PackedLinear& linear, const LinearInput& input, const LinearOutput& output,
                   int64_t begin, int64_t end);
};

#define LMD_DECLARE_LEVEL(level)             \
  namespace level {                          \
  extern const LinearKernels linear_kernels; \
  }
LMD_DECLARE_LEVEL(default_)
#if defined(LMD_HAS_X86_KERNELS)
LMD_DECLARE_LEVEL(avx2)
LMD_DECLARE_LEVEL(avx512)
LMD_DECLARE_LEVEL(avx512_bf16)
LMD_DECLARE_LEVEL(avx512_vnni)
#endif
#undef LMD_DECLARE_LEVEL

inline const LinearKernels& linear_kernels_of([[maybe_unused]] LinearFormat format) {
#if defined(LMD_HAS_X86_KERNELS)
  if (format == LinearFormat::kBFloat16 && use_avx512_bf16()) return avx512_bf16::linear_kernels;
  if (format == LinearFormat::kInt8 && use_avx512_vnni()) return avx512_vnni::linear_kernels;
  return *select_kernel(&default_::linear_kernels, &avx2::linear_kernels,
                        &avx512::linear_kernels);
#else
  return default_::linear_kernels;
#endif
}

}  // namespace lmdecode
