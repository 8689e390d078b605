// beam_finalize on the CPU: a request at a time.
#pragma once

#include <cstddef>

#include "beam/beam_finalize.h"
#include "beam/beam_finalize_plan.h"

namespace lmdecode::beam {

inline size_t beam_finalize_scratch_bytes(const BeamFinalizeParams& params) {
  return static_cast<size_t>(params.state.hypotheses + params.ranked()) * sizeof(int32_t);
}

// scratch: beam_finalize_scratch_bytes(params).
inline void beam_finalize_request(const BeamFinalizeParams& params, int64_t request,
                                  int32_t* scratch) {
  const int64_t hypotheses = params.state.hypotheses;
  for (int64_t group = 0; group < params.num_groups; ++group) {
    const int64_t entry = request * params.num_groups + group;
    add_open_beams(params, entry, scratch);
    copy_open_beams(params, entry, scratch, {});
  }
  int32_t* const places = scratch + hypotheses;
  const int64_t ranked = params.ranked();
  for (int64_t rank = 0; rank < ranked; ++rank) places[rank] = kNoPlace;
  for (int64_t place = 0; place < params.num_groups * hypotheses; ++place) {
    const int64_t rank = hypothesis_rank(params, request, place);
    if (rank >= 0 && rank < ranked) places[rank] = static_cast<int32_t>(place);
  }
  for (int64_t rank = 0; rank < params.num_return_sequences; ++rank) {
    write_result(params, request, rank, rank < ranked ? places[rank] : kNoPlace, {});
  }
}

}  // namespace lmdecode::beam
