// Compiled once for each CPU capability, with LMD_SIMD naming it.
#include "sampling/top_k_top_p_sample_cpu_kernel.h"

#include "sampling/sampling_workspace.h"
#include "sampling/top_k_top_p_sample_levels.h"

namespace lmdecode::LMD_SIMD::sampling {

using namespace lmdecode::sampling;

namespace {

template <class T>
void run_rows(const TopKTopPSampleParams& params, int64_t begin, int64_t end, void* workspace) {
  const DialectRules rules = dialect_rules(params.dialect);
  const SamplingWorkspace w = split_sampling_workspace(workspace, params.vocab);
  const CandidateList list{w.value, w.token, w.key, w.mass, w.spare_key, w.spare_mass, 0};
  const T* logits = static_cast<const T*>(params.logits);
  if (params.logits_vocab_stride == 1) {
    RowSampler<T> sampler(params, rules, list);
    for (int64_t row = begin; row < end; ++row)
      sampler.run(logits + row * params.logits_row_stride, row);
    return;
  }
  // Strided rows are gathered first, as f32: exact.
  RowSampler<float> sampler(params, rules, list);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = logits + row * params.logits_row_stride;
    for (int64_t i = 0; i < params.vocab; ++i)
      w.row[i] = to_float(x[i * params.logits_vocab_stride]);
    sampler.run(w.row, row);
  }
}

}  // namespace

void top_k_top_p_sample_rows(const TopKTopPSampleParams& params, int64_t begin, int64_t end,
                             void* workspace) {
  switch (params.dtype) {
    case DType::kFloat32:
      return run_rows<float>(params, begin, end, workspace);
    case DType::kFloat16:
      return run_rows<Half>(params, begin, end, workspace);
    case DType::kBFloat16:
      return run_rows<BFloat16>(params, begin, end, workspace);
  }
}

}  // namespace lmdecode::LMD_SIMD::sampling
