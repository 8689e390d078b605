// Rows, then requests, to threads.
#include "beam/beam_tuning.h"
#include "beam/log_softmax_top_k.h"
#include "beam/processor_edits.h"
#include "common/parallel_workspace.h"
#include "sampling/sampling_workspace.h"
#include "simd/cpu_capability.h"

namespace lmdecode {

#define LMD_DECLARE_LEVEL(level)                                                                  \
  namespace level {                                                                               \
  void log_softmax_top_k_rows(const LogSoftmaxTopKParams& params, int64_t begin, int64_t end,     \
                              void* workspace);                                                   \
  void log_softmax_top_k_requests(const LogSoftmaxTopKParams& params, int64_t begin, int64_t end, \
                                  int64_t size, void* workspace);                                 \
  void log_softmax_top_k_processed_rows(const LogSoftmaxTopKParams& params,                       \
                                        const LogitsProcessors& processors, int64_t max_edits,    \
                                        int64_t begin, int64_t end, void* workspace);             \
  }
LMD_DECLARE_LEVEL(default_)
#if defined(LMD_HAS_X86_KERNELS)
LMD_DECLARE_LEVEL(avx2)
LMD_DECLARE_LEVEL(avx512)
#endif
#undef LMD_DECLARE_LEVEL

namespace {

// body(begin, end, workspace) on parts of [0, size), each thread with `bytes` of workspace.
template <class Body>
void run_parts(int64_t size, double nanoseconds, size_t bytes, const Body& body) {
  const int64_t grain = 1 + static_cast<int64_t>(beam_tuning::kMinTaskNanoseconds / nanoseconds);
  parallel_with_workspace("log_softmax_top_k", size, grain, bytes, body,
                          [] { return std::string(); });
}

void run_rows(const LogSoftmaxTopKParams& params) {
#if defined(LMD_HAS_X86_KERNELS)
  const auto rows = select_kernel(&default_::log_softmax_top_k_rows, &avx2::log_softmax_top_k_rows,
                                  &avx512::log_softmax_top_k_rows);
#else
  const auto rows = &default_::log_softmax_top_k_rows;
#endif
  using namespace beam_tuning;
  run_parts(params.rows, kRowNanoseconds + static_cast<double>(params.vocab) * kNanosecondsPerLogit,
            sampling_workspace_bytes(params.vocab),
            [&](int64_t begin, int64_t end, void* memory) { rows(params, begin, end, memory); });
}

void run_rows(const LogSoftmaxTopKParams& params, const LogitsProcessors& processors) {
#if defined(LMD_HAS_X86_KERNELS)
  const auto rows = select_kernel(&default_::log_softmax_top_k_processed_rows,
                                  &avx2::log_softmax_top_k_processed_rows,
                                  &avx512::log_softmax_top_k_processed_rows);
#else
  const auto rows = &default_::log_softmax_top_k_processed_rows;
#endif
  int64_t longest = 0;
  for (int64_t request = 0; request < params.requests; ++request) {
    const int64_t length = processors.history_length(request);
    if (length > longest) longest = length;
  }
  const int64_t edits = longest + processors.end_tokens.size + processors.suppressed_tokens.size +
                        processors.diversity_tokens.size;
  using namespace beam_tuning;
  const double nanoseconds = kRowNanoseconds +
                             static_cast<double>(params.vocab) * kNanosecondsPerLogit +
                             static_cast<double>(edits) * kNanosecondsPerEdit;
  run_parts(params.rows, nanoseconds,
            sampling_workspace_bytes(params.vocab) + TokenEdits::bytes(edits, params.vocab),
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
#if defined(LMD_HAS_X86_KERNELS)
  const auto requests =
      select_kernel(&default_::log_softmax_top_k_requests, &avx2::log_softmax_top_k_requests,
                    &avx512::log_softmax_top_k_requests);
#else
  const auto requests = &default_::log_softmax_top_k_requests;
#endif
  using namespace beam_tuning;
  int64_t most_beams = 0;
  for (int64_t request = 0; request < params.requests; ++request) {
    const auto range = params.rows_of(request);
    if (range.end - range.begin > most_beams) most_beams = range.end - range.begin;
  }
  const int64_t size = most_beams * params.row_candidates;
  run_parts(params.requests, kRowNanoseconds + static_cast<double>(size) * kNanosecondsPerCandidate,
            sampling_workspace_bytes(size), [&](int64_t begin, int64_t end, void* memory) {
              requests(params, begin, end, size, memory);
            });
}

}  // namespace lmdecode
