// The parts of packed_linear that are compiled for each level, and their choice by format.
#pragma once

#include "linear/packed_layout.h"
#include "simd/kernel_levels.h"

namespace lmdecode::linear {

// Rows of x to be put into the form of LinearInput.
struct LinearInputRows {
  LinearFormat format;
  const float* x;  // [rows, in_features]
  int64_t row_stride;
  int64_t element_stride;
  int64_t in_features;
  char* rows;  // [rows, row_bytes], aligned to 64
  int64_t row_bytes;
  float* scales;          // int8 without groups: [rows]
  float* rotated;         // where x is rotated: [in_features], scratch
  int64_t tile_rows = 0;  // as of LinearInput
};

// How rows are cut for products.
struct LinearRowCut {
  int64_t block;  // the most rows of a call of multiply()
  int64_t tile;   // how many rows lie in a tile; 0: rows lie one after another
};

struct LinearKernels {
  LinearTile (*tile)(LinearFormat format);
  // Panels [begin, end) with their scales and offsets; weight: from their first output on. Not of
  // formats that floats are not rounded to.
  void (*pack)(const PackedLinearShape& shape, const float* weight, int64_t out_stride,
               int64_t in_stride, void* packed, int64_t begin, int64_t end);
  void (*prepare)(const LinearInputRows& input, int64_t begin, int64_t end);
  LinearRowCut (*cut)(LinearFormat format, int64_t row_bytes, int64_t rows);
  // Panels [begin, end).
  void (*multiply)(const PackedLinear& linear, const LinearInput& input, const LinearOutput& output,
                   int64_t begin, int64_t end);
};

}  // namespace lmdecode::linear

LMD_DECLARE_KERNELS(linear, extern const LinearKernels linear_kernels;)

namespace lmdecode::linear {

inline const LinearKernels& linear_kernels_of(LinearFormat format) {
  if (format == LinearFormat::kFloat32) return *LMD_SELECT_KERNEL(linear, linear_kernels);
  return *LMD_SELECT_AMX_KERNEL(linear, linear_kernels,
                                format == LinearFormat::kBFloat16
                                    ? LMD_SELECT_BF16_KERNEL(linear, linear_kernels)
                                    : LMD_SELECT_VNNI_KERNEL(linear, linear_kernels));
}

}  // namespace lmdecode::linear
