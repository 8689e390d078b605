// The scratch of decoding_steps: one block, planned before the first step.
#pragma once

#include "beam/log_softmax_top_k.h"
#include "common/split_memory.h"
#include "decoder/beam_parents.h"
#include "decoder/decoder_forward.h"
#include "decoder/decoding.h"
#include "decoder/greedy_choice.h"

namespace lmdecode::decoder {

struct DecodingWorkspace {
  unsigned char* forward;  // of DecoderForward

  // The searches that go on, group after group.
  int64_t* slots;            // [slots]
  int64_t* padding;          // [slots]: of their prompts
  int64_t* row_offsets;      // [slots + 1]: where the rows of each begin, in the step
  uint8_t* are_beams_alike;  // [slots]: whether its beams have one row of the model's
  int64_t* pass_offsets;     // [slots + 1]: the same, counted from the first row of a group

  // Candidates and next beams of a group.
  float* beam_scores;      // [cache rows]
  float* scores;           // [slots, num_candidates]
  float* log_probs;        // likewise
  int64_t* tokens;         // likewise
  int64_t* beams;          // likewise
  uint8_t* status;         // [slots]
  int32_t* top_k_scratch;  // see LogSoftmaxTopKParams
  float* next_scores;      // [cache rows]
  int64_t* next_tokens;    // [cache rows]
  int64_t* next_parents;   // [cache rows]
  int32_t* decisions;      // [slots, num_candidates]
  int64_t* chosen;         // [slots, beams]: the tokens of this step

  // The processors of a group.
  int64_t* sequences;             // [cache rows, capacity]
  int64_t* lengths;               // [slots]
  float* repetition_penalty;      // [slots]
  int64_t* no_repeat_ngram_size;  // [slots]
  float* diversity_penalty;       // [slots]
  int64_t* diversity_tokens;      // [slots, (num_groups - 1) * beams]
  int64_t* banned;                // [slots, num_bans]
  int64_t* forced;                // [slots]
  unsigned char* edits;           // of one row
  float* row_values;              // [vocab]
  int32_t* allowed_tokens;        // [cache rows, ceil(vocab / 32)]
  beam::TokenTrie* tries;         // [slots]
  int32_t* pass_nodes;            // [cache rows]

  int32_t* nodes;  // [slots, beams]: of the beams that tries hold

  BeamParents parents;

  static constexpr int64_t kPromptRows = 64;  // at least so many tokens of prompts at a time

  static int64_t max_rows(const DecodingParams& p) {
    return p.cache_rows() > kPromptRows ? p.cache_rows() : kPromptRows;
  }

  // The most tokens of a row that rules name one by one.
  static int64_t max_edits(const DecodingParams& p) {
    return p.state.capacity + p.token_rules.num_bans + (p.num_groups - 1) * p.state.beams;
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
    block.take(&pass_offsets, slot_count + 1);
    block.take(&beam_scores, cache_rows);
    block.take(&scores, candidates);
    block.take(&log_probs, candidates);
    block.take(&tokens, candidates);
    block.take(&beams, candidates);
    block.take(&status, slot_count);
    const int64_t row_candidates =
        p.num_candidates < p.config.vocab ? p.num_candidates : p.config.vocab;
    block.take(&top_k_scratch,
               beam::LogSoftmaxTopKParams::scratch_size(cache_rows, row_candidates));
    block.take(&next_scores, cache_rows);
    block.take(&next_tokens, cache_rows);
    block.take(&next_parents, cache_rows);
    block.take(&decisions, candidates);
    block.take(&chosen, cache_rows);
    block.take(&sequences, cache_rows * p.state.capacity);
    block.take(&lengths, slot_count);
    block.take(&repetition_penalty, slot_count);
    block.take(&no_repeat_ngram_size, slot_count);
    block.take(&diversity_penalty, slot_count);
    block.take(&diversity_tokens, slot_count * (p.num_groups - 1) * p.state.beams);
    block.take(&banned, slot_count * p.token_rules.num_bans);
    block.take(&forced, slot_count);
    block.take(&edits, static_cast<int64_t>(greedy_edit_bytes(max_edits(p), p.config.vocab)));
    block.take(&row_values, p.config.vocab);
    block.take(&allowed_tokens, cache_rows * ((p.config.vocab + 31) / 32));
    block.take(&tries, slot_count);
    block.take(&pass_nodes, cache_rows);
    block.take(&nodes, cache_rows);
    parents.take(&block, p.state.beams, p.state.capacity);
    return block.used();
  }
};

}  // namespace lmdecode::decoder
