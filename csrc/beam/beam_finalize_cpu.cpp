// Requests to threads.
#include "beam/beam_finalize.h"
#include "beam/beam_finalize_plan.h"
#include "beam/beam_tuning.h"
#include "common/parallel_workspace.h"

namespace lmdecode {
namespace {

// scratch: [hypotheses] of the places of a slot, then [num_return_sequences].
void finalize_request(const BeamFinalizeParams& params, int64_t request, int32_t* scratch) {
  const int64_t hypotheses = params.state.hypotheses;
  for (int64_t group = 0; group < params.num_groups; ++group) {
    const int64_t entry = request * params.num_groups + group;
    add_open_beams(params, entry, scratch);
    copy_open_beams(params, entry, scratch, {});
  }
  int32_t* const places = scratch + hypotheses;
  for (int64_t rank = 0; rank < params.num_return_sequences; ++rank) {
    places[rank] = static_cast<int32_t>(kNoPlace);
  }
  for (int64_t place = 0; place < params.num_groups * hypotheses; ++place) {
    const int64_t rank = hypothesis_rank(params, request, place);
    if (rank >= 0 && rank < params.num_return_sequences) {
      places[rank] = static_cast<int32_t>(place);
    }
  }
  for (int64_t rank = 0; rank < params.num_return_sequences; ++rank) {
    write_result(params, request, rank, places[rank], {});
  }
}

}  // namespace

void beam_finalize_cpu(const BeamFinalizeParams& params) {
  const int64_t places = params.num_groups * params.state.hypotheses;
  const double nanoseconds =
      beam_tuning::kStepNanoseconds +
      static_cast<double>(params.num_return_sequences * params.state.capacity + places * places) *
          beam_tuning::kStepNanosecondsPerToken;
  const int64_t grain = 1 + static_cast<int64_t>(beam_tuning::kMinTaskNanoseconds / nanoseconds);
  const size_t bytes =
      static_cast<size_t>(params.state.hypotheses + params.num_return_sequences) * sizeof(int32_t);
  parallel_with_workspace(
      "beam_finalize", params.requests, grain, bytes,
      [&](int64_t begin, int64_t end, void* memory) {
        for (int64_t request = begin; request < end; ++request) {
          finalize_request(params, request, static_cast<int32_t*>(memory));
        }
      },
      [] { return std::string(); });
}

}  // namespace lmdecode
