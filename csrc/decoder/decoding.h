// Steps of beam search or greedy decoding with a decoder: embedding, layers, projection to the
// vocabulary, candidates, next beams and early stop, without a return to the caller between steps.
// docs/reference/decoder.md is the user's page.
//
// A slot is a search (or a group of a diverse one). A request is the num_groups slots that share a
// memory; slot s belongs to request s / num_groups. All persistent state is in the caller's
// tensors. Beam b of slot s writes to cache row s * beams + b. Keys and values are never moved; the
// table has the cache row of each position of a beam's sequence.
//
// A prompt may be padded on its left, with kPadding. Positions count from its first token, lengths
// include the padding.
//
// A step allocates only thread-local scratch, which is kept between calls.
#pragma once

#include "beam/beam_search_state.h"
#include "beam/token_rules.h"
#include "decoder/decoder_forward.h"

namespace lmdecode::decoder {

constexpr int64_t kPadding = INT64_MIN;  // in sequences: no token

struct DecodingParams {
  DecoderConfig config;
  DecoderWeights weights;
  beam::BeamSearchState state;
  beam::BeamSearchParameters parameters;
  beam::BeamDialect dialect = beam::BeamDialect::kGenerate;
  beam::TokenRules token_rules;  // one row a slot
  bool greedy = false;
  int64_t num_groups = 1;
  int64_t num_candidates = 0;  // of a slot
  int64_t max_steps = 0;
  bool stop_when_done = false;  // return when a search has ended, not only when all have
  bool chooses = true;          // else one step at most, and no tokens: the caller chooses them

  DecoderCaches caches;               // capacity equals the state's
  int64_t* cached_lengths = nullptr;  // [requests]: positions whose keys are in the cache
  void* workspace = nullptr;          // decoding_workspace_bytes(), aligned to 64
  // [cache rows, vocab] or null: each step writes the logits of its rows, before any rule
  float* logits = nullptr;
  // Likewise the values after the rules: logits if a greedy loop chooses, else log-probabilities
  float* scores = nullptr;

  int64_t cache_rows() const { return state.slots * state.beams; }
  // The padding of a slot's prompt, that is, its request's.
  int64_t padding(int64_t slot) const {
    const int64_t* const tokens = state.sequences + slot * state.beams * state.capacity;
    int64_t count = 0;
    while (count < state.lengths[slot] && tokens[count] == kPadding) ++count;
    return count;
  }
  // Whether the search of a slot is unfinished.
  bool is_running(int64_t slot) const {
    const int64_t most = parameters.max_lengths[slot];
    return state.done[slot] == 0 && state.status[slot] == 0 &&
           state.lengths[slot] < (most > 0 && most < state.capacity ? most : state.capacity);
  }
};

size_t decoding_workspace_bytes(const DecodingParams& params);

// Returns the number of steps: max_steps, or less if no search is left, or if stop_when_done is set
// and one has ended. Runs on the calling thread and torch's worker threads; the arguments have been
// checked.
int64_t decoding_steps_cpu(const DecodingParams& params);

}  // namespace lmdecode::decoder
