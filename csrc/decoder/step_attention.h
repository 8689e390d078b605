// Attention of decoding: one query a row, to the keys of its own sequence, which are read through
// the beam indirection, and to the memory of its request, which all of its rows share.
//
//   out = sum of exp(score - max) value / (sum of exp(score - max) + denominator_epsilon)
//
// in f32. A row's result depends on its own query, keys and values only, not on the rows beside it
// nor on the threads; the last bits differ from one CPU capability to another. Caches hold heads
// padded to a multiple of kAttentionBlock floats, the padding 0.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "simd/kernel_levels.h"

namespace lmdecode::decoder {

constexpr int64_t kAttentionBlock = 16;

LMD_HOST_DEVICE constexpr int64_t padded_to_block(int64_t size) {
  return (size + kAttentionBlock - 1) / kAttentionBlock * kAttentionBlock;
}

struct AttentionShape {
  int64_t heads = 0;
  int64_t head_size = 0;
  float scale = 1.0f;
  float denominator_epsilon = 0.0f;

  LMD_HOST_DEVICE int64_t size() const { return heads * head_size; }
  LMD_HOST_DEVICE int64_t padded_head() const { return padded_to_block(head_size); }
};

// The rows of a step: each is the end of a sequence, or of a part of one that has been seen.
struct StepRows {
  int64_t count = 0;
  const int32_t* cache_rows = nullptr;  // [count]: where its keys and values are written
  const int32_t* positions = nullptr;   // [count]: at which position; earlier ones are there
  const int32_t* requests = nullptr;    // [count]: the request whose memory it reads
  // [num_runs + 1]: run i is rows run_begins[i] to run_begins[i + 1], all of one request
  const int32_t* run_begins = nullptr;
  int64_t num_runs = 0;
};

struct SelfAttentionParams {
  AttentionShape shape;
  StepRows rows;
  int64_t capacity = 0;            // positions of the cache
  const float* qkv = nullptr;      // [rows, 3, heads, head_size]
  float* out = nullptr;            // [rows, heads, head_size]
  float* keys = nullptr;           // [cache rows, heads, capacity, padded head]
  float* values = nullptr;         // likewise
  const int32_t* table = nullptr;  // [cache rows, capacity]: the cache row of each position
  const float* bias = nullptr;     // [heads, bias_stride], by distance from the query; null: none
  int64_t bias_stride = 0;
};

struct CrossAttentionParams {
  AttentionShape shape;
  StepRows rows;
  int64_t source = 0;                // positions of the memory, a multiple of kAttentionBlock
  const float* queries = nullptr;    // [rows, heads, head_size]
  float* out = nullptr;              // [rows, heads, head_size]
  const float* keys = nullptr;       // [requests, heads, padded head, source]
  const float* values = nullptr;     // [requests, heads, source, padded head]
  const int64_t* lengths = nullptr;  // [requests]: positions that are attended to; none: out is 0
};

// The keys and values that come from the memory of a request, laid out for cross-attention.
struct CrossCacheParams {
  AttentionShape shape;
  int64_t source = 0;                // of the cache, a multiple of kAttentionBlock
  int64_t length = 0;                // of the memory, at most source
  const float* key_value = nullptr;  // [length, 2, heads, head_size]
  float* keys = nullptr;             // [heads, padded head, source], of one request
  float* values = nullptr;           // [heads, source, padded head]
};

// Caches of one layer, shapes as above.
struct LayerCaches {
  int64_t capacity = 0;
  float* self_keys = nullptr;
  float* self_values = nullptr;
  const int32_t* table = nullptr;
  int64_t source = 0;
  const float* cross_keys = nullptr;
  const float* cross_values = nullptr;
  const int64_t* memory_lengths = nullptr;
};

// On torch's threads. The indices have been checked.
void self_attention_step_cpu(const SelfAttentionParams& params);
void cross_attention_step_cpu(const CrossAttentionParams& params);
void write_cross_cache_cpu(const CrossCacheParams& params);

}  // namespace lmdecode::decoder

LMD_DECLARE_KERNELS(decoder, void self_attention_items(const SelfAttentionParams& params,
                                                       int64_t begin, int64_t end, void* memory);
                    void cross_attention_items(const CrossAttentionParams& params, int64_t begin,
                                               int64_t end, void* memory);
                    int64_t step_attention_scratch(const AttentionShape& shape, int64_t positions);)
