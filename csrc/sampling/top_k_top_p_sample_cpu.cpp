// Rows to threads.
#include "common/parallel_workspace.h"
#include "sampling/sampling_tuning.h"
#include "sampling/sampling_workspace.h"
#include "sampling/top_k_top_p_sample.h"
#include "simd/cpu_capability.h"

namespace lmdecode {

namespace default_ {
void top_k_top_p_sample_rows(const TopKTopPSampleParams& params, int64_t begin, int64_t end,
                             void* workspace);
}
#if defined(LMD_HAS_X86_KERNELS)
namespace avx2 {
void top_k_top_p_sample_rows(const TopKTopPSampleParams& params, int64_t begin, int64_t end,
                             void* workspace);
}
namespace avx512 {
void top_k_top_p_sample_rows(const TopKTopPSampleParams& params, int64_t begin, int64_t end,
                             void* workspace);
}
#endif

void top_k_top_p_sample_cpu(const TopKTopPSampleParams& params) {
#if defined(LMD_HAS_X86_KERNELS)
  const auto rows = select_kernel(&default_::top_k_top_p_sample_rows,
                                  &avx2::top_k_top_p_sample_rows, &avx512::top_k_top_p_sample_rows);
#else
  const auto rows = &default_::top_k_top_p_sample_rows;
#endif
  using namespace sampling_tuning;
  const bool top_k = params.top_k.rows != nullptr || params.top_k.value > 0;
  const double row_time =
      kRowNanoseconds + static_cast<double>(params.vocab) *
                            (top_k ? kTopKNanosecondsPerLogit : kOtherNanosecondsPerLogit);
  const int64_t grain = 1 + static_cast<int64_t>(kMinTaskNanoseconds / row_time);
  parallel_with_workspace(
      "top_k_top_p_sample", params.batch, grain, sampling_workspace_bytes(params.vocab),
      [&](int64_t begin, int64_t end, void* workspace) { rows(params, begin, end, workspace); },
      [&] { return "; logits has a vocabulary of " + std::to_string(params.vocab); });
}

}  // namespace lmdecode
