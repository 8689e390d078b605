// beam_step: each request's candidates to its next beams. docs/reference/beam.md is the user's
// page.
//
// One thread first decides for a request (beam_step_plan.h), with no more than numbers written;
// then its sequences move, in place. Requests do not depend on each other.
#pragma once

#include <cstdint>

#include "beam/beam_search_state.h"

namespace lmdecode::beam {

struct BeamStepParams {
  BeamSearchState state;
  BeamSearchParameters parameters;
  BeamDialect dialect = BeamDialect::kGenerate;  // of requests without their own
  int64_t requests = 0;
  int64_t num_candidates = 0;
  int64_t rows = 0;  // of the next beams

  RequestRows<float> scores;  // [requests, num_candidates], best first; -inf: none (unless kScorer)
  RequestRows<int64_t> tokens;
  RequestRows<int64_t> beams;         // counted within the request
  RequestRows<float> log_probs;       // null: 0
  RequestRows<bool> stopped;          // null: none
  RequestRows<float> bonus;           // [requests, beams]; null: 0
  RequestRows<uint8_t> status;        // [requests, 1]; null: 0
  RequestRows<int64_t> slots;         // [requests, 1]; null: request r is in slot r
  RequestRows<int64_t> own_dialects;  // [requests, 1], of BeamDialect; null: dialect
  RequestRows<int64_t> offsets;       // [requests + 1, 1]; null: state.beams rows a request
  RequestRows<int64_t> ends;     // [requests, 1], beside offsets; null: the next request's offset
  RequestRows<int64_t> parents;  // [parent_count, 1]; null: offsets
  // Entries of parents. The rows of one end where the next begins; 0: they need not.
  int64_t parent_count = 0;
  CallerSequences sequences;

  float* next_scores = nullptr;     // [rows]
  int64_t* next_tokens = nullptr;   // [rows]
  int64_t* next_parents = nullptr;  // [rows]
  int32_t* decisions = nullptr;     // [requests, num_candidates]

  LMD_HOST_DEVICE BeamDialect dialect_of(int64_t request) const {
    return own_dialects.data == nullptr ? dialect
                                        : static_cast<BeamDialect>(own_dialects.at(request, 0));
  }

  struct RowRange {
    int64_t begin, end;
  };
  LMD_HOST_DEVICE RowRange rows_of(int64_t request) const {
    if (offsets.data == nullptr) {
      return {request * state.beams, (request + 1) * state.beams};
    }
    int64_t begin = offsets.at(request, 0);
    int64_t end = ends.data == nullptr ? offsets.at(request + 1, 0) : ends.at(request, 0);
    begin = begin < 0 ? 0 : begin < rows ? begin : rows;
    end = end < begin ? begin : end < rows ? end : rows;
    return {begin, end};
  }
};

// Runs on the calling thread and torch's worker threads. The content of the tensors has been
// checked: slots are different, and every index is in range.
void beam_step_cpu(const BeamStepParams& params);

// stream is a cudaStream_t; launches only. Indices out of range are held to their ranges. Throws
// std::invalid_argument, before the launch, for more beams and hypotheses than fit a block.
void beam_step_cuda(const BeamStepParams& params, void* stream);

}  // namespace lmdecode::beam
