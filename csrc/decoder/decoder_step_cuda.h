// The parts of a decoder step on a device other than matrix products (cuBLAS): attention, and the
// operations between products. decoder/step_attention.h has the layouts of caches. Caches and
// products have one dtype; the residual stream x, norms and softmax are f32.
// docs/reference/decoder.md is the user's page.
//
// Row r of a step is cache row r. Rows of a launch are unordered, so no row may read what another
// one writes: the table never points to a position that another row writes in this step. Rows at
// one position, as in a search, cannot break this. Indices are on the device and not checked
// before: a row with an index out of range gets 0 and writes nothing.
#pragma once

#include <cstdint>

#include "common/half.h"
#include "decoder/step_attention.h"

namespace lmdecode::decoder {

struct StepSelfAttentionParams {
  AttentionShape shape;
  DType dtype = DType::kFloat32;
  int64_t rows = 0;
  int64_t capacity = 0;
  const void* qkv = nullptr;           // [rows, 3, heads, head_size]
  void* out = nullptr;                 // [rows, heads, head_size]
  void* keys = nullptr;                // [rows, heads, capacity, padded head]
  void* values = nullptr;              // likewise
  const int32_t* table = nullptr;      // [rows, capacity]; the row's own position is its own row's
  const int32_t* positions = nullptr;  // [rows]
  const float* bias = nullptr;         // [heads, bias_stride] by distance; null: none
  int64_t bias_stride = 0;             // at least capacity
};

struct StepCrossAttentionParams {
  AttentionShape shape;
  DType dtype = DType::kFloat32;
  int64_t requests = 0;
  int64_t request_rows = 0;          // rows of a request, neighbours
  int64_t source = 0;                // a multiple of kAttentionBlock
  const void* queries = nullptr;     // [requests * request_rows, heads, head_size]
  void* out = nullptr;               // likewise
  const void* keys = nullptr;        // [requests, heads, padded head, source]
  const void* values = nullptr;      // [requests, heads, source, padded head]
  const int64_t* lengths = nullptr;  // [requests]; beyond source counts as source
};

struct StepCrossCacheParams {
  AttentionShape shape;
  DType dtype = DType::kFloat32;
  int64_t requests = 0;
  int64_t length = 0;               // of the memories, at most source
  int64_t source = 0;               // of the cache
  const void* key_value = nullptr;  // [requests, length, 2, heads, head_size]
  void* keys = nullptr;             // [requests, heads, padded head, source]: 0 after the length
  void* values = nullptr;           // [requests, heads, source, padded head]
};

// x += delta + bias, then its norm: applied to x itself (post-norm), or only to the input of the
// next product (pre-norm).
struct StepAddNormParams {
  DType dtype = DType::kFloat32;
  int64_t rows = 0;
  int64_t size = 0;
  float* x = nullptr;            // [rows, size]
  const void* delta = nullptr;   // [rows, size] or null
  const float* bias = nullptr;   // [size] or null
  const float* gamma = nullptr;  // [size] or null: no norm
  const float* beta = nullptr;   // [size] or null; of layer norm alone
  float epsilon = 0.0f;
  bool rms_norm = false;
  bool norm_first = false;  // the norm is not of the residual stream
  void* out = nullptr;      // [rows, size]: the input of the next product
};

struct StepEmbedParams {
  DType dtype = DType::kFloat32;
  int64_t rows = 0;
  int64_t size = 0;
  int64_t vocab = 0;
  int64_t num_positions = 0;
  const int64_t* tokens = nullptr;        // [rows]
  const int32_t* positions = nullptr;     // [rows]
  const void* embedding = nullptr;        // [vocab, size]
  const float* position_table = nullptr;  // [num_positions, size] or null
  float scale = 1.0f;
  int64_t position_offset = 0;
  float* x = nullptr;  // [rows, size]
};

enum class StepActivation : int32_t { kRelu = 1, kGelu = 2, kGeluTanh = 3, kSilu = 4 };

// up = activation(up), or activation(gate) * up
struct StepActivateParams {
  DType dtype = DType::kFloat32;
  int64_t count = 0;
  void* up = nullptr;          // [count]
  const void* gate = nullptr;  // [count] or null
  StepActivation activation = StepActivation::kRelu;
};

// No allocation and no synchronisation, so a CUDA graph can capture them.
void decoder_self_attention_cuda(const StepSelfAttentionParams& params, void* stream);
void decoder_cross_attention_cuda(const StepCrossAttentionParams& params, void* stream);
void decoder_cross_cache_cuda(const StepCrossCacheParams& params, void* stream);
void decoder_add_norm_cuda(const StepAddNormParams& params, void* stream);
void decoder_embed_cuda(const StepEmbedParams& params, void* stream);
void decoder_activate_cuda(const StepActivateParams& params, void* stream);

}  // namespace lmdecode::decoder
