// packed_linear: y = activation(x W^T + bias) * multiplier + residual, with W packed once.
//
// Rows of x and y are f32; W is held as f32, as bfloat16, as int8 with a scale for each output, or
// as four or eight bits with a scale for each group along in_features: kFloat32   products and sums
// in f32. kBFloat16  x and W rounded to bfloat16 (nearest, ties to even); products and sums in f32.
// On processors that multiply pairs, subnormal numbers count as 0. kInt8      x is rounded row by
// row, W output by output, to whole multiples of their largest magnitude / 127. The products are
// summed exactly, in integers. A row of x, or an output's row of W, that holds NaN or inf gives
// NaN. others     W is scale * number, or scale * number + minimum, with a scale and a minimum for
// each group of elements. x is rounded group by group, as kInt8 rounds rows. The products of a
// group are summed exactly; the groups are added in their order, each by a fused multiplication and
// addition, then minimum * sum of x likewise. NaN and inf as for kInt8.
//
// Formats with "rotated" in their name do the same after the rotation of linear/rotation.h, of W
// once and of each x.
//
// A row of y depends only on its row of x, not on other rows, their number, the threads or the
// panels that a call computes. Sums run along in_features, in chains of a fixed length that start
// at 0; the sums of the chains are added in order. f32 and bfloat16 are bitwise the same on every
// machine that runs the same level; other formats, up to their activation function, at every level.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/half.h"

namespace lmdecode::linear {

enum class GgufType : int32_t;  // linear/gguf_blocks.h

// linear/grouped_format.h describes the formats with groups. The comments name llama.cpp's types
// whose weights a format holds unchanged.
enum class LinearFormat : int32_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kInt8 = 2,
  kInt4 = 3,  // Q4_0
  kInt4Zeros32 = 4,
  kInt4Zeros64 = 5,
  kInt4Zeros128 = 6,
  kInt8Rotated = 7,
  kInt4Minimums32 = 8,  // Q4_1
  kInt4Minimums64 = 9,
  kInt4Minimums128 = 10,
  kInt8Groups = 11,           // Q8_0, Q5_0
  kInt8Minimums = 12,         // Q5_1
  kNonlinear = 13,            // IQ4_NL
  kMicroscaled = 14,          // MXFP4
  kInt4SuperMinimums32 = 15,  // Q4_K
  kInt8SuperMinimums32 = 16,  // Q5_K
  kInt8Super16 = 17,          // Q6_K
  kInt4SuperMinimums16 = 18,  // Q2_K
  kInt4Super16 = 19,          // Q3_K
  kNonlinearSuper = 20,       // IQ4_XS
  kInt4RotatedMinimums32 = 21,
  kInt4RotatedMinimums64 = 22,
  kInt4RotatedMinimums128 = 23,
};

constexpr int64_t kMaxLinearFormat = 23;
constexpr int64_t kMaxGroup = 128;

// Whether W and rows of x are rotated before rounding: linear/rotation.h.
constexpr bool is_rotated(LinearFormat format) {
  return format == LinearFormat::kInt8Rotated || format == LinearFormat::kInt4RotatedMinimums32 ||
         format == LinearFormat::kInt4RotatedMinimums64 ||
         format == LinearFormat::kInt4RotatedMinimums128;
}

// Weights an output, a row of x at a time, in whole numbers up to 127.
constexpr bool is_int8_row(LinearFormat format) {
  return format == LinearFormat::kInt8 || format == LinearFormat::kInt8Rotated;
}

// gelu(x) = x Phi(x); its tanh form; silu(x) = x / (1 + exp(-x)).
enum class Activation : int32_t { kNone = 0, kRelu = 1, kGelu = 2, kGeluTanh = 3, kSilu = 4 };

// Largest in_features of kInt8: 2^17 products of 127 * 127 stay below 2^31.
constexpr int64_t kMaxInt8Features = int64_t{1} << 17;

// Elements of 4 bytes along in_features in one chain of additions: 1024 bfloat16, and floats. In a
// long chain sums round more: with 512 floats that was most of the error of float32 models.
constexpr int64_t kChainLength = 512, kFloatChainLength = 64;

struct PackedLinearShape {
  int64_t in_features = 0;
  int64_t out_features = 0;
  LinearFormat format = LinearFormat::kFloat32;
};

// W [out_features, in_features] in the order of the kernels of this process's CPU capability; see
// packed_layout.h. Not owned, not checked: the shape must be the one it was packed with.
struct PackedLinear {
  PackedLinearShape shape;
  const void* packed = nullptr;  // packed_linear_bytes(shape) bytes, aligned to 64
};

// Size in bytes of the packed weight, a multiple of 64. One allocation may hold many packed
// weights; from 2 MB on it should be an allocation of common/huge_pages.h.
size_t packed_linear_bytes(const PackedLinearShape& shape);

// Packs weight[o * out_stride + i * in_stride] on torch's threads; any strides, so [out, in] and
// [in, out] kernels alike.
void pack_linear(const PackedLinearShape& shape, const float* weight, int64_t out_stride,
                 int64_t in_stride, void* packed);

// row [in_features] = row `output` of W in the precision of its format: for an embedding that is
// tied to the projection to the vocabulary.
void read_packed_row(const PackedLinear& linear, int64_t output, float* row);

// A weight W that is already int4, contiguous.
struct QuantizedWeight {
  const uint8_t* values = nullptr;  // [out_features, in_features], at most 15
  const Half* scales = nullptr;     // [out_features, groups]
  const uint8_t* zeros = nullptr;   // [out_features, groups], at most 16; null: 8
};

// Packs it unchanged. shape.format is kInt4, or a format with zeros and with groups of its size,
// of which in_features is a multiple. kInt4 reads no zeros.
void pack_quantized_linear(const PackedLinearShape& shape, const QuantizedWeight& weight,
                           void* packed);

// Packs rows of blocks of a GGUF file, row_stride bytes apart, unchanged. shape.format is
// gguf_block(type).format; in_features is a multiple of its step.
void pack_gguf_linear(const PackedLinearShape& shape, GgufType type, const uint8_t* blocks,
                      int64_t row_stride, void* packed);

// values [rows, row_blocks * elements of a block] = the dequantised blocks.
void dequantize_gguf(GgufType type, const uint8_t* blocks, int64_t row_stride, int64_t rows,
                     int64_t row_blocks, float* values);

// Rows of x in the form that the products of a format read. Weights of the same format and
// in_features share it, such as those of queries, keys and values.
struct LinearInput {
  const void* rows = nullptr;     // [count, row_bytes]
  const float* scales = nullptr;  // int8 without groups: [count]
  int64_t row_bytes = 0;
  int64_t count = 0;
  // Not 0: rows lie in tiles [count / tile_rows, row_bytes / 64, tile_rows, 64], the last one
  // filled up.
  int64_t tile_rows = 0;

  // begin: where a tile begins.
  LinearInput slice(int64_t begin, int64_t end) const {
    return {static_cast<const char*>(rows) + begin * row_bytes,
            scales == nullptr ? nullptr : scales + begin, row_bytes, end - begin, tile_rows};
  }
};

// Bytes of scratch that prepare_linear_input() needs for up to this many rows. 0 for kFloat32 if
// rows are contiguous: they are read in place.
size_t linear_input_bytes(LinearFormat format, int64_t in_features, int64_t rows,
                          int64_t element_stride = 1);

// Maximum over all formats, for contiguous rows.
size_t most_linear_input_bytes(int64_t in_features, int64_t rows);

// x[row * row_stride + i * element_stride], i < in_features. memory: linear_input_bytes(), aligned
// to 64. memory and x must outlive the result. On torch's threads; serial if called in a parallel
// region.
LinearInput prepare_linear_input(LinearFormat format, const float* x, int64_t row_stride,
                                 int64_t rows, int64_t in_features, void* memory,
                                 int64_t element_stride = 1);

// Output and epilogue of a product. y may be residual or multiplier itself, but must not overlap
// them otherwise, nor the input.
struct LinearOutput {
  float* y = nullptr;  // [rows, out_features]
  int64_t y_stride = 0;
  const float* bias = nullptr;  // [out_features]
  Activation activation = Activation::kNone;
  const float* multiplier = nullptr;  // [rows, out_features]: the other half of a gated layer
  int64_t multiplier_stride = 0;
  const float* residual = nullptr;  // [rows, out_features]
  int64_t residual_stride = 0;

  // The columns from `column` on, for other weights.
  LinearOutput from_column(int64_t column) const {
    LinearOutput rest = *this;
    rest.y += column;
    if (bias != nullptr) rest.bias += column;
    if (multiplier != nullptr) rest.multiplier += column;
    if (residual != nullptr) rest.residual += column;
    return rest;
  }
};

// Number of output panels of a weight: the units of work, fixed by shape and level.
int64_t packed_linear_panels(const PackedLinearShape& shape);

// The outputs of panels [begin, end) for all rows of the input, on the calling thread: for use
// inside parallel regions. Needs IEEE mode (common/float_mode.h), no scratch, throws nothing.
void packed_linear_range(const PackedLinear& linear, const LinearInput& input,
                         const LinearOutput& output, int64_t begin, int64_t end);

// All outputs, on torch's threads; serial if called in a parallel region.
void packed_linear(const PackedLinear& linear, const LinearInput& input,
                   const LinearOutput& output);

// Likewise the outputs of two weights of the same shape and format, some of the first and then the
// same of the second, which reads them from the cache where they are its multiplier.
void packed_linear_pair(const PackedLinear& first, const LinearOutput& first_output,
                        const PackedLinear& second, const LinearOutput& second_output,
                        const LinearInput& input);

}  // namespace lmdecode::linear
