// Requests to threads.
#include "beam/beam_finalize_cpu.h"

#include "beam/beam_finalize.h"
#include "beam/beam_tuning.h"
#include "common/parallel_rows.h"

namespace lmdecode::beam {

void beam_finalize_cpu(const BeamFinalizeParams& params) {
  const int64_t places = params.num_groups * params.state.hypotheses;
  const double nanoseconds =
      tuning::kStepNanoseconds +
      static_cast<double>(params.num_return_sequences * params.state.capacity + places * places) *
          tuning::kStepNanosecondsPerToken;
  parallel_rows("beam_finalize", params.requests, nanoseconds, beam_finalize_scratch_bytes(params),
                [&](int64_t begin, int64_t end, void* memory) {
                  for (int64_t request = begin; request < end; ++request) {
                    beam_finalize_request(params, request, static_cast<int32_t*>(memory));
                  }
                });
}

}  // namespace lmdecode::beam
