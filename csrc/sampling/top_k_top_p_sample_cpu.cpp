// Rows to threads.
#include "common/parallel_rows.h"
#include "sampling/sampling_tuning.h"
#include "sampling/sampling_workspace.h"
#include "sampling/top_k_top_p_sample.h"

namespace lmdecode::sampling {

void top_k_top_p_sample_cpu(const TopKTopPSampleParams& params) {
  const auto rows = LMD_SELECT_KERNEL(sampling, top_k_top_p_sample_rows);
  using namespace tuning;
  const bool top_k = params.top_k.rows != nullptr || params.top_k.value > 0;
  const double row_time =
      kRowNanoseconds + static_cast<double>(params.vocab) *
                            (top_k ? kTopKNanosecondsPerLogit : kOtherNanosecondsPerLogit);
  parallel_rows(
      "top_k_top_p_sample", params.batch, row_time, sampling_workspace_bytes(params.vocab),
      [&](int64_t begin, int64_t end, void* workspace) { rows(params, begin, end, workspace); },
      [&] { return "; logits has a vocabulary of " + std::to_string(params.vocab); });
}

}  // namespace lmdecode::sampling
