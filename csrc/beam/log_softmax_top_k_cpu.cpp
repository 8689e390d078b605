// Rows, then requests, to threads.
#include "beam/beam_tuning.h"
#include "beam/log_softmax_top_k.h"
#include "beam/processor_edits.h"
#include "common/parallel_rows.h"
#include "sampling/sampling_workspace.h"

namespace lmdecode::beam {

namespace {

constexpr const char* kOp = "log_softmax_top_k";

void run_rows(const LogSoftmaxTopKParams& params) {
  const auto rows = LMD_SELECT_KERNEL(beam, log_softmax_top_k_rows);
  using namespace tuning;
  parallel_rows(
      kOp, params.rows, kRowNanoseconds + static_cast<double>(params.vocab) * kNanosecondsPerLogit,
      sampling::sampling_workspace_bytes(params.vocab),
      [&](int64_t begin, int64_t end, void* memory) { rows(params, begin, end, memory); });
}

void run_rows(const LogSoftmaxTopKParams& params, const LogitsProcessors& processors) {
  const auto rows = LMD_SELECT_KERNEL(beam, log_softmax_top_k_processed_rows);
  int64_t longest = 0;
  for (int64_t request = 0; request < params.requests; ++request) {
    const int64_t length = processors.history_length(request);
    if (length > longest) longest = length;
  }
  const int64_t edits = longest + processors.end_tokens.size + processors.suppressed_tokens.size +
                        processors.diversity_tokens.size;
  using namespace tuning;
  const double nanoseconds = kRowNanoseconds +
                             static_cast<double>(params.vocab) * kNanosecondsPerLogit +
                             static_cast<double>(edits) * kNanosecondsPerEdit;
  parallel_rows(
      kOp, params.rows, nanoseconds,
      sampling::sampling_workspace_bytes(params.vocab) + TokenEdits::bytes(edits, params.vocab),
      [&](int64_t begin, int64_t end, void* memory) {
        rows(params, processors, edits, begin, end, memory);
      });
}

}  // namespace

void log_softmax_top_k_cpu(const LogSoftmaxTopKParams& params, const LogitsProcessors* processors) {
  if (processors == nullptr) {
    run_rows(params);
  } else {
    run_rows(params, *processors);
  }
  const auto requests = LMD_SELECT_KERNEL(beam, log_softmax_top_k_requests);
  using namespace tuning;
  int64_t most_beams = 0;
  for (int64_t request = 0; request < params.requests; ++request) {
    const auto range = params.rows_of(request);
    if (range.end - range.begin > most_beams) most_beams = range.end - range.begin;
  }
  const int64_t size = most_beams * params.row_candidates;
  parallel_rows(
      kOp, params.requests, kRowNanoseconds + static_cast<double>(size) * kNanosecondsPerCandidate,
      sampling::sampling_workspace_bytes(size), [&](int64_t begin, int64_t end, void* memory) {
        requests(params, begin, end, size, memory);
      });
}

}  // namespace lmdecode::beam
