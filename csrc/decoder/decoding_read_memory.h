// The memories of requests, such as an encoder's output, to the keys and values that
// cross-attention reads in every step. docs/reference/decoder.md is the user's page.
#pragma once

#include <cstddef>
#include <cstdint>

#include "decoder/decoder_config.h"

namespace lmdecode::decoder {

struct ReadMemoryParams {
  DecoderConfig config;
  const LayerWeights* layers = nullptr;  // [config.layers]: cross_key_value of each

  int64_t count = 0;                 // memories
  int64_t source = 0;                // positions of each
  const float* memory = nullptr;     // [count, source, memory_size]
  const int64_t* lengths = nullptr;  // [count] of this stride: positions that are attended to
  int64_t length_stride = 1;
  const int64_t* requests = nullptr;  // [count] of this stride
  int64_t request_stride = 1;

  // The caches, of which only the rows of these requests are written; layouts: step_attention.h.
  int64_t cache_requests = 0;
  int64_t cache_source = 0;           // at least source
  float* cross_keys = nullptr;        // [layers, cache_requests, heads, padded head, cache_source]
  float* cross_values = nullptr;      // [layers, cache_requests, heads, cache_source, padded head]
  int64_t* memory_lengths = nullptr;  // [cache_requests]
  int64_t* cached_lengths = nullptr;  // [cache_requests]: becomes 0

  void* workspace = nullptr;  // read_memory_workspace_bytes(), aligned to 64
};

size_t read_memory_workspace_bytes(const ReadMemoryParams& params);

// On torch's threads. The arguments have been checked.
void decoding_read_memory_cpu(const ReadMemoryParams& params);

}  // namespace lmdecode::decoder
