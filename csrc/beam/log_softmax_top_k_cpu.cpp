// Rows, then requests, to threads.
#include "beam/beam_tuning.h"
#include "beam/log_softmax_top_k.h"
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

}  // namespace

void log_softmax_top_k_cpu(const LogSoftmaxTopKParams& params) {
#if defined(LMD_HAS_X86_KERNELS)
  const auto rows = select_kernel(&default_::log_softmax_top_k_rows, &avx2::log_softmax_top_k_rows,
                                  &avx512::log_softmax_top_k_rows);
  const auto requests =
      select_kernel(&default_::log_softmax_top_k_requests, &avx2::log_softmax_top_k_requests,
                    &avx512::log_softmax_top_k_requests);
#else
  const auto rows = &default_::log_softmax_top_k_rows;
  const auto requests = &default_::log_softmax_top_k_requests;
#endif
  using namespace beam_tuning;
  run_parts(params.rows, kRowNanoseconds + static_cast<double>(params.vocab) * kNanosecondsPerLogit,
            sampling_workspace_bytes(params.vocab),
            [&](int64_t begin, int64_t end, void* memory) { rows(params, begin, end, memory); });
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
