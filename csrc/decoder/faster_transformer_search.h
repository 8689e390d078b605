// The beam search of FasterTransformer v2.0, with its faults left out: docs/reference/decoder.md
// has the contract. A beam that ends goes on, with its end token and score as they are, and
// competes; the model need not run for it.
#pragma once

#include "decoder/decoder_forward.h"

namespace lmdecode::decoder {

struct FasterTransformerParams {
  DecoderConfig config;
  DecoderWeights weights;
  DecoderCaches caches;     // of batch * beams rows
  int64_t memory_rows = 1;  // rows, neighbours, that share a memory: 1 or beams
  int64_t batch = 0;
  int64_t beams = 0;
  int64_t max_steps = 0;
  int64_t start_token = 0;
  int64_t end_token = 0;
  int32_t* output_ids = nullptr;        // [max_steps, batch * beams]
  int32_t* parent_ids = nullptr;        // [max_steps, batch * beams], rows
  int32_t* sequence_lengths = nullptr;  // [batch * beams]
  void* workspace = nullptr;            // faster_transformer_workspace_bytes(), aligned to 64
};

size_t faster_transformer_workspace_bytes(const FasterTransformerParams& params);

// Returns the status (log_softmax_top_k.h) of the first request that has failed, 0 for none. Runs
// on the calling thread and torch's worker threads; the arguments have been checked.
uint8_t faster_transformer_search_cpu(const FasterTransformerParams& params);

}  // namespace lmdecode::decoder
