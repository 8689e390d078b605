// Requests to threads.
#include "beam/beam_step_cpu.h"

#include "beam/beam_step.h"
#include "beam/beam_tuning.h"
#include "common/parallel_rows.h"

namespace lmdecode::beam {

void beam_step_cpu(const BeamStepParams& params) {
  const BeamSearchState& state = params.state;
  const double nanoseconds =
      tuning::kStepNanoseconds +
      static_cast<double>(params.num_candidates) * tuning::kStepNanosecondsPerCandidate +
      static_cast<double>(state.beams * state.capacity) * tuning::kStepNanosecondsPerToken;
  parallel_rows("beam_step", params.requests, nanoseconds, BeamStepScratch::bytes(state),
                [&](int64_t begin, int64_t end, void* memory) {
                  beam_step_requests(params, begin, end, memory);
                });
}

}  // namespace lmdecode::beam
