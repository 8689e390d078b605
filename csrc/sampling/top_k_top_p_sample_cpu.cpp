// Rows to threads.
#include <atomic>
#include <stdexcept>
#include <string>

#include "common/float_mode.h"
#include "common/parallel.h"
#include "common/workspace.h"
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
  const size_t bytes = sampling_workspace_bytes(params.vocab);
  std::atomic<bool> out_of_memory = false;
  parallel_for(params.batch, grain, [&](int64_t begin, int64_t end) {
    thread_local Workspace workspace;
    void* memory = workspace.reserve(bytes);
    if (memory == nullptr) {
      out_of_memory = true;
      return;
    }
    const ScopedIeeeMode ieee;
    rows(params, begin, end, memory);
  });
  if (out_of_memory) {
    throw std::runtime_error("top_k_top_p_sample: no memory for " + std::to_string(bytes) +
                             " bytes of scratch a thread; logits has a vocabulary of " +
                             std::to_string(params.vocab));
  }
}

}  // namespace lmdecode
