// A step of beam searches, from logits to the next beams: token rules, candidates, next beams, and
// trie nodes. Every loop uses it: beam_search_step_ on either device, and the steps of a decoder.
// docs/reference/beam.md is the user's page.
//
// The searches of a pass are chosen at the same time: requests, or one group of each. Later groups
// read the choices of earlier ones. A search's result does not depend on other searches.
//
// On the CPU it allocates only thread-local scratch, which is kept between calls; on CUDA nothing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "beam/beam_search_state.h"
#include "beam/token_rules.h"
#include "common/half.h"

namespace lmdecode::beam {

// One search of a step: a request, or a group of one.
struct SearchOfStep {
  int64_t slot;       // in the state
  int64_t rule_row;   // in the token rules
  int64_t dialect;    // a BeamDialect
  int64_t first_row;  // of the logits
  int64_t num_rows;   // num_beams of its slot; or 1: its beams are alike, all but one in name only
  int64_t pass_row;   // the first of its rows in its pass
  int64_t next_row;   // the first of its num_beams next beams, after its earlier groups'
  int64_t next_end;   // after the last of them
  int64_t num_earlier;  // next beams of earlier groups, right before next_row
};

// Searches that are chosen at the same time.
struct PassOfStep {
  int64_t searches;     // their number; they follow the previous pass's
  int64_t rows;         // num_rows of them all
  int64_t num_earlier;  // the most of any
};

struct SearchStepParams {
  BeamSearchState state;
  BeamSearchParameters parameters;
  TokenRules token_rules;
  const SearchOfStep* searches = nullptr;  // [count], by passes
  int64_t count = 0;
  const PassOfStep* passes = nullptr;  // [num_passes], on the host in any case
  int64_t num_passes = 0;
  int64_t num_candidates = 0;  // of each; >= 1
  // One beam and one candidate each: the largest logit after the rules.
  bool greedy = false;
  // With kScorer: missing candidates continue too, with a score far below all others.
  bool fills_missing = false;

  // [rows, vocab]; on the CPU f32 and contiguous if greedy, or if a timestamp rule is on. The rules
  // change greedy rows in place there.
  void* logits = nullptr;
  DType dtype = DType::kFloat32;
  int64_t rows = 0;
  int64_t vocab = 0;
  int64_t logits_row_stride = 0;
  int64_t logits_vocab_stride = 1;
  // [rows, ceil(vocab / 32)] or null
  const int32_t* token_bitmask = nullptr;
  int64_t bitmask_row_stride = 0;
  int64_t bitmask_stride = 1;
  const float* bonus = nullptr;  // [count, beams of the state] or null: see BeamStepParams

  int32_t* nodes = nullptr;  // [slots, beams]: trie nodes of constrained beams
  // [slots, beams, vocab] or null: the rows after the rules, as in BeamSearch's scores; CPU alone
  float* ruled_scores = nullptr;
  // Else ruled_scores alone are written, log-probabilities: the caller chooses the tokens. CPU
  // alone
  bool chooses = true;

  int64_t next_rows = 0;
  int64_t* next_tokens = nullptr;   // [next_rows]
  int64_t* next_parents = nullptr;  // [next_rows]: rows of the logits
  int64_t* ended = nullptr;         // [count] or null: 0 it goes on, 1 done, 2 failed
  // Candidates of the choice: [count, num_candidates] each, and status [count].
  float* scores = nullptr;
  float* log_probs = nullptr;
  int64_t* tokens = nullptr;
  int64_t* beams = nullptr;
  int32_t* decisions = nullptr;
  uint8_t* status = nullptr;
};

// Upper bounds of the sizes of a step, for its scratch.
struct SearchStepSizes {
  int64_t searches = 0;  // of a pass
  int64_t rows = 0;      // of a pass
  int64_t next_rows = 0;
  int64_t num_candidates = 0;
  int64_t num_bans = 0;
  int64_t num_earlier = 0;
  int64_t capacity = 0;
  int64_t vocab = 0;
  // Rows are worked on one by one: it is greedy, scores are kept, or there may be timestamps.
  bool is_row_by_row = false;
  // On CUDA alone: of the step, and whether any rule may be on.
  int64_t num_tries = 0;
  bool has_rules = false;
};

size_t search_step_workspace_bytes(const SearchStepSizes& sizes);
size_t search_step_cuda_workspace_bytes(const SearchStepSizes& sizes);

// Finds the trie nodes of a search's beams, from their generated tokens.
void find_trie_nodes(const BeamSearchState& state, const BeamSearchParameters& parameters,
                     const TokenTrie& trie, int64_t slot, int32_t* nodes);

// workspace: search_step_workspace_bytes(sizes), aligned to 64. Runs on the calling thread and
// torch's worker threads; the arguments have been checked.
void search_step_cpu(const SearchStepParams& params, const SearchStepSizes& sizes, void* workspace);

// workspace: search_step_cuda_workspace_bytes(sizes) on the device, aligned to 64. stream is a
// cudaStream_t; launches only. token_rules.tries are on the host, the arrays of each on the device.
// Rules whose tensor is null are off. Numbers out of range are clamped. Throws
// std::invalid_argument for more beams and hypotheses than fit a block.
void search_step_cuda(const SearchStepParams& params, const SearchStepSizes& sizes, void* workspace,
                      void* stream);

}  // namespace lmdecode::beam
