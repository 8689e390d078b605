// Rows to threads.
#include "attention/attention_tuning.h"
#include "attention/merge_attention_states.h"
#include "common/parallel_rows.h"

namespace lmdecode::attention {

void merge_attention_states_cpu(const MergeAttentionStatesParams& params) {
  const auto run = LMD_SELECT_KERNEL(attention, merge_attention_states_rows);
  using namespace tuning;
  const double row_nanoseconds =
      kMergeRowNanoseconds + kNanosecondsPerElement * static_cast<double>(params.size);
  parallel_rows(params.rows(), row_nanoseconds,
                [&](int64_t begin, int64_t end) { run(params, begin, end); });
}

}  // namespace lmdecode::attention
