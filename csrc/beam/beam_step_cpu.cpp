// Requests to threads.
#include "beam/beam_step.h"
#include "beam/beam_step_cpu_kernel.h"
#include "beam/beam_tuning.h"
#include "common/parallel_workspace.h"

namespace lmdecode::beam {

void beam_step_cpu(const BeamStepParams& params) {
  const BeamSearchState& state = params.state;
  const double nanoseconds =
      tuning::kStepNanoseconds +
      static_cast<double>(params.num_candidates) * tuning::kStepNanosecondsPerCandidate +
      static_cast<double>(state.beams * state.capacity) * tuning::kStepNanosecondsPerToken;
  const int64_t grain = 1 + static_cast<int64_t>(tuning::kMinTaskNanoseconds / nanoseconds);
  parallel_with_workspace(
      "beam_step", params.requests, grain, BeamStepScratch::bytes(state),
      [&](int64_t begin, int64_t end, void* memory) {
        beam_step_requests(params, begin, end, memory);
      },
      [] { return std::string(); });
}

}  // namespace lmdecode::beam
