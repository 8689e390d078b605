// Between the projection of a layer and its attention: queries and keys are turned by their
// positions, keys and values go to the cache.
//
//   y[i] = x[i] cos - x[i + half] sin,  y[i + half] = x[i + half] cos + x[i] sin,  i < half
//
// for the first 2 half features of a head; the others stay. The same bits at every level.
#pragma once

#include <cstdint>

#include "common/half.h"
#include "simd/kernel_levels.h"

namespace lmdecode::decoder {

struct CausalRowsParams {
  int64_t heads = 0;
  int64_t kv_heads = 0;  // 0: there are queries alone
  int64_t head_size = 0;
  int64_t half = 0;                // pairs of features that are turned
  int64_t angle_stride = 0;        // from a row of cosines or sines to the next
  float* qkv = nullptr;            // [rows, row_stride]: queries, in place, keys, values
  int64_t row_stride = 0;          // at least (heads + 2 kv_heads) * head_size
  const float* cosines = nullptr;  // [rows, angle_stride]
  const float* sines = nullptr;    // likewise
  DType dtype = DType::kFloat32;   // of the cache
  bool is_int8 = false;            // or rows of attention::Int8Cell, rounded to a scale each
  // [rows, heads * head_size], where the cache is not float32: the queries in its dtype
  void* queries = nullptr;
  unsigned char* keys = nullptr;    // of block 0 of the cache
  unsigned char* values = nullptr;  // likewise
  const int64_t* places = nullptr;  // [rows]: elements from there to head 0 of a row's position
  int64_t head_stride = 0;          // elements from a head of the cache to the next
};

// to [rows, size], so far apart, = from, in float32.
struct ConvertRowsParams {
  const void* from = nullptr;  // [rows, size] BFloat16
  float* to = nullptr;
  int64_t size = 0;
  int64_t to_stride = 0;
};

// out [rows, size] *= sigmoid(gates).
struct GateRowsParams {
  const float* gates = nullptr;  // [rows, gate_stride]
  int64_t gate_stride = 0;
  float* out = nullptr;
  int64_t size = 0;
};

}  // namespace lmdecode::decoder

// The kernels at every level, and the last of the logits:
//
//   soft_cap: values [size] = cap * tanh(values * scale / cap), or where cap is 0 values * scale.
LMD_DECLARE_KERNELS(decoder,
                    void causal_rows(const CausalRowsParams& params, int64_t begin, int64_t end);
                    void convert_rows(const ConvertRowsParams& params, int64_t begin, int64_t end);
                    void gate_rows(const GateRowsParams& params, int64_t begin, int64_t end);
                    void soft_cap(float* values, int64_t size, float scale, float cap);)
