// Rows to threads.
#include "attention/attention_tuning.h"
#include "attention/merge_attention_states.h"
#include "common/float_mode.h"
#include "common/parallel.h"
#include "simd/cpu_capability.h"

namespace lmdecode {

#define LMD_DECLARE_LEVEL(level)                                                          \
  namespace level {                                                                       \
  void merge_attention_states_rows(const MergeAttentionStatesParams& params, int64_t begin, \
                                   int64_t end);                                          \
  }
LMD_DECLARE_LEVEL(default_)
#if defined(LMD_HAS_X86_KERNELS)
LMD_DECLARE_LEVEL(avx2)
LMD_DECLARE_LEVEL(avx512)
#endif
#undef LMD_DECLARE_LEVEL

void merge_attention_states_cpu(const MergeAttentionStatesParams& params) {
#if defined(LMD_HAS_X86_KERNELS)
  const auto run =
      select_kernel(&default_::merge_attention_states_rows, &avx2::merge_attention_states_rows,
                    &avx512::merge_attention_states_rows);
#else
  const auto run = &default_::merge_attention_states_rows;
#endif
  using namespace attention_tuning;
  const double row_nanoseconds = kMergeRowNanoseconds +
                                 kNanosecondsPerElement * static_cast<double>(params.size);
  parallel_for(params.rows(), 1 + static_cast<int64_t>(kMinTaskNanoseconds / row_nanoseconds),
               [&](int64_t begin, int64_t end) {
                 const ScopedIeeeMode ieee;
                 run(params, begin, end);
               });
}

}  // namespace lmdecode
