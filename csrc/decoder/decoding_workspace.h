// The scratch of decoding_steps: one block, planned before the first step.
#pragma once

#include "beam/search_step.h"
#include "common/split_memory.h"
#include "decoder/beam_parents.h"
#include "decoder/decoder_forward.h"
#include "decoder/decoding.h"

namespace lmdecode::decoder {

struct DecodingWorkspace {
  unsigned char* forward;  // of DecoderForward

  // The searches that go on, group after group.
  int64_t* slots;            // [slots]
  int64_t* padding;          // [slots]: of their prompts
  int64_t* row_offsets;      // [slots + 1]: where the rows of each begin, in the step
  uint8_t* are_beams_alike;  // [slots]: whether its beams have one row of the model's

  // Of a step: beam/search_step.h.
  beam::SearchOfStep* searches;  // [slots]
  beam::PassOfStep* passes;      // [num_groups]
  unsigned char* step;           // scratch
  float* scores;                 // [slots, num_candidates]
  float* log_probs;              // likewise
  int64_t* tokens;               // likewise
  int64_t* beams;                // likewise
  int32_t* decisions;            // likewise
  uint8_t* status;               // [slots]
  int64_t* next_tokens;          // [slots, beams]
  int64_t* next_parents;         // [slots, beams]

  int32_t* nodes;  // [slots, beams]: of the beams that tries hold

  BeamParents parents;

  static constexpr int64_t kPromptRows = 64;  // at least so many tokens of prompts at a time

  static int64_t max_rows(const DecodingParams& p) {
    return p.cache_rows() > kPromptRows ? p.cache_rows() : kPromptRows;
  }

  static beam::SearchStepSizes step_sizes(const DecodingParams& p) {
    beam::SearchStepSizes sizes;
    sizes.searches = p.state.slots;
    sizes.rows = sizes.next_rows = p.cache_rows();
    sizes.num_candidates = p.num_candidates;
    sizes.num_bans = p.token_rules.num_bans;
    sizes.num_earlier = (p.num_groups - 1) * p.state.beams;
    sizes.capacity = p.state.capacity;
    sizes.vocab = p.config.vocab;
    sizes.is_row_by_row = true;
    return sizes;
  }

  // With null for the memory it only counts. Returns the bytes.
  size_t split(const DecodingParams& p, void* memory) {
    const int64_t cache_rows = p.cache_rows(), slot_count = p.state.slots;
    const int64_t candidates = slot_count * p.num_candidates;
    SplitMemory block(memory);
    block.take(&forward,
               static_cast<int64_t>(DecoderForward::bytes(p.config, max_rows(p), cache_rows)));
    block.take(&slots, slot_count);
    block.take(&padding, slot_count);
    block.take(&row_offsets, slot_count + 1);
    block.take(&are_beams_alike, slot_count);
    block.take(&searches, slot_count);
    block.take(&passes, p.num_groups);
    block.take(&step, static_cast<int64_t>(beam::search_step_workspace_bytes(step_sizes(p))));
    block.take(&scores, candidates);
    block.take(&log_probs, candidates);
    block.take(&tokens, candidates);
    block.take(&beams, candidates);
    block.take(&decisions, candidates);
    block.take(&status, slot_count);
    block.take(&next_tokens, cache_rows);
    block.take(&next_parents, cache_rows);
    block.take(&nodes, cache_rows);
    parents.take(&block, p.state.beams, p.state.capacity);
    return block.used();
  }
};

}  // namespace lmdecode::decoder
