// beam_finalize: the best hypotheses of each request, which may have several slots, its groups.
// docs/reference/beam.md is the user's page.
#pragma once

#include <cstdint>

#include "beam/beam_search_state.h"

namespace lmdecode::beam {

struct BeamFinalizeParams {
  BeamSearchState state;
  BeamSearchParameters parameters;
  BeamDialect dialect = BeamDialect::kGenerate;
  int64_t requests = 0;
  int64_t num_groups = 1;  // slots of a request
  int64_t num_return_sequences = 1;
  bool add_open = false;  // running beams of searches that are not done become hypotheses first

  RequestRows<int64_t> slots;  // [requests * num_groups, 1]; null: entry i is slot i
  CallerSequences sequences;   // of entries, not of requests
  RequestRows<float> scores;   // [requests * num_groups, beams]; null: the state's

  int64_t* best_sequences = nullptr;     // [requests, num_return_sequences, capacity]
  int64_t* best_lengths = nullptr;       // [requests, num_return_sequences]
  double* best_scores = nullptr;         // [requests, num_return_sequences]
  float* best_log_probs = nullptr;       // [requests, num_return_sequences, log_prob_capacity]
  int32_t* best_beam_indices = nullptr;  // [requests, num_return_sequences, beam_index_capacity]
  int64_t* best_places = nullptr;        // [requests, num_return_sequences]

  // How many results can be hypotheses: more than there are places cannot.
  LMD_HOST_DEVICE int64_t ranked() const {
    const int64_t places = num_groups * state.hypotheses;
    return num_return_sequences < places ? num_return_sequences : places;
  }

  // -1 where the slots do not hold it: CUDA cannot check that before the launch.
  LMD_HOST_DEVICE int64_t slot_of(int64_t entry) const {
    const int64_t slot = slots.data == nullptr ? entry : slots.at(entry, 0);
    return slot >= 0 && slot < state.slots ? slot : -1;
  }
};

// Runs on the calling thread and torch's worker threads. The content of the tensors has been
// checked.
void beam_finalize_cpu(const BeamFinalizeParams& params);

// stream is a cudaStream_t; launches only. Indices out of range are held to their ranges. Throws
// std::invalid_argument, before the launch, for more hypotheses than fit a block.
void beam_finalize_cuda(const BeamFinalizeParams& params, void* stream);

}  // namespace lmdecode::beam
