// The model on the rows of a step: from tokens to logits, in the caller's caches.
#pragma once

#include "decoder/decoder_layer.h"
#include "decoder/step_attention.h"

namespace lmdecode::decoder {

// Everything that lasts between steps, but for the search; shapes with `rows` cache rows.
struct DecoderCaches {
  int64_t rows = 0;
  int64_t requests = 0;
  int64_t capacity = 0;
  int64_t source = 0;                       // positions of the cross cache
  float* self_keys = nullptr;               // [layers, rows, heads, capacity, padded head]
  float* self_values = nullptr;             // likewise
  const float* cross_keys = nullptr;        // [layers, requests, heads, padded head, source]
  const float* cross_values = nullptr;      // [layers, requests, heads, source, padded head]
  const int64_t* memory_lengths = nullptr;  // [requests]
  int32_t* table = nullptr;                 // [rows, capacity]
};

class DecoderForward {
 public:
  // max_rows: of a step; max_logits: rows with logits. memory: bytes(), aligned to 64.
  DecoderForward(const DecoderConfig& config, const DecoderWeights& weights,
                 const DecoderCaches& caches, int64_t max_rows, int64_t max_logits, void* memory);

  static size_t bytes(const DecoderConfig& config, int64_t max_rows, int64_t max_logits);

  void clear() { rows_ = {0, cache_rows_, positions_, requests_, run_begins_, 0}; }

  // The token at this position of the sequence whose cache row this is, in which the table finds
  // it. Earlier positions have been added, in this step or before.
  void add(int64_t cache_row, int64_t position, int64_t request, int64_t token);

  int64_t count() const { return rows_.count; }

  // Keys and values of the rows that were added are written; logits [count, vocab] if wanted.
  void run(bool to_logits);

  float* logits() { return logits_; }

 private:
  size_t split(void* memory, int64_t max_rows, int64_t max_logits);
  void embed();

  const DecoderConfig& config_;
  const DecoderWeights& weights_;
  const DecoderCaches& caches_;
  StepRows rows_;
  int32_t* cache_rows_;  // [max_rows]
  int32_t* positions_;   // [max_rows]
  int32_t* requests_;    // [max_rows]
  int32_t* run_begins_;  // [max_rows + 1]
  int64_t* tokens_;      // [max_rows]
  float* x_;             // [max_rows, model_size]
  float* logits_;        // [max_logits, vocab]
  LayerBuffers buffers_;
};

}  // namespace lmdecode::decoder
