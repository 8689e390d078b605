// Scratch of a step of a decoder-only model, and its rows.
#pragma once

#include <algorithm>

#include "common/split_memory.h"
#include "decoder/causal_forward.h"
#include "decoder/state_layer.h"

namespace lmdecode::decoder {

// Tokens of one entry that are computed together: rows side by side.
struct Segment {
  int64_t entry;
  int64_t first_token;  // of the call's
  int64_t position;     // of the first
  int64_t count;
  int64_t logits;  // number of last tokens whose logits are returned
  int64_t row;

  int64_t end() const { return row + count; }
};

// Rows of one attention op: prompts, with the rows of a sequence side by side, or generated tokens,
// each a sequence to the op.
struct AttentionGroup {
  int64_t first_row;
  int64_t rows;
  int64_t sequences;
  int64_t* query_ends;               // [sequences + 1], of prompts
  int64_t* lengths;                  // [sequences]: number of keys, with the rows' own
  int32_t* tables[kMaxPagedCaches];  // [sequences, max_blocks]
};

struct CausalWorkspace {
  Segment* segments;                 // [max_rows]
  int64_t* tokens;                   // [max_rows]
  int64_t* positions;                // [max_rows]
  int64_t* places[kMaxPagedCaches];  // [max_rows]: see CausalRowsParams
  float* cosines;                    // [num_rotary, max_rows, most_turned() / 2]
  float* sines;                      // likewise
  float* x;                          // [max_rows, model_size]
  uint16_t* queries;                 // [max_rows, most_queries()], where caches are not float32
  uint16_t* context;                 // likewise
  int64_t* num_tokens;               // [sequences]
  kv_cache::BlockCopy* copies;       // [sequences]
  AttentionGroup prompts, generated;
  StateSegment* state_segments;  // [max_rows], of segments
  StateTarget* state_targets;    // [max_rows]
  float* gates;                  // [max_rows, state_layer_gates()]
  float* table_rows;             // [max_rows, layers * per_layer.size]
  float* per_layer;              // likewise: the inputs of layers
  unsigned char* layer;

  // Returns the bytes; with null for the memory it only counts them.
  size_t split(const CausalModel& m, int64_t max_rows, int64_t sequences, int64_t max_blocks,
               void* memory, LayerBuffers* buffers) {
    const DecoderConfig& c = m.config;
    SplitMemory block(memory);
    block.take(&segments, max_rows);
    block.take(&tokens, max_rows);
    block.take(&positions, max_rows);
    const int64_t angles = m.num_rotary * max_rows * m.most_turned() / 2;
    block.take(&cosines, angles);
    block.take(&sines, angles);
    block.take(&x, max_rows * c.model_size);
    block.take(&queries, max_rows * m.most_queries());
    block.take(&context, max_rows * m.most_queries());
    block.take(&num_tokens, sequences);
    block.take(&copies, sequences);
    const int64_t most_prompts = std::min(sequences, max_rows);
    block.take(&prompts.query_ends, most_prompts + 1);
    block.take(&prompts.lengths, most_prompts);
    block.take(&generated.lengths, max_rows);
    for (int64_t cache = 0; cache < kMaxPagedCaches; ++cache) {
      block.take(&places[cache], max_rows);
      block.take(&prompts.tables[cache], most_prompts * max_blocks);
      block.take(&generated.tables[cache], max_rows * max_blocks);
    }
    if (m.mixer.kind != MixerKind::kNone) {
      block.take(&state_segments, max_rows);
      block.take(&state_targets, max_rows);
      block.take(&gates, max_rows * state_layer_gates(m.mixer));
    }
    block.take(&table_rows, max_rows * c.layers * m.per_layer.size);
    block.take(&per_layer, max_rows * c.layers * m.per_layer.size);
    block.take(&layer, static_cast<int64_t>(split_layer_buffers(c, max_rows, nullptr, buffers)));
    if (layer != nullptr) split_layer_buffers(c, max_rows, layer, buffers);
    return block.used();
  }
};

}  // namespace lmdecode::decoder
