// Compiled once for each CPU capability, with LMD_SIMD naming it.
#include "sampling/top_k_top_p_sample_cpu_kernel.h"

#include "sampling/top_k_top_p_sample.h"

namespace lmdecode::LMD_SIMD::sampling {

using namespace lmdecode::sampling;

namespace {

template <class T>
void run_rows(const TopKTopPSampleParams& params, int64_t begin, int64_t end, void* workspace) {
  const DialectRules rules = dialect_rules(params.dialect);
  const SamplingWorkspace w = split_sampling_workspace(workspace, params.vocab);
  const CandidateList list = list_in(w);
  const T* logits = static_cast<const T*>(params.logits);
  if (params.logits_vocab_stride == 1) {
    CpuRowSampler<T> sampler(params, rules, list);
    for (int64_t row = begin; row < end; ++row)
      sampler.run(logits + row * params.logits_row_stride, row);
    return;
  }
  CpuRowSampler<float> sampler(params, rules, list);
  for (int64_t row = begin; row < end; ++row) {
    sampler.run(gather_row(logits + row * params.logits_row_stride, params.vocab,
                           params.logits_vocab_stride, w.row),
                row);
  }
}

}  // namespace

void top_k_top_p_sample_rows(const TopKTopPSampleParams& params, int64_t begin, int64_t end,
                             void* workspace) {
  with_element_type(params.dtype, [&](auto element) {
    run_rows<decltype(element)>(params, begin, end, workspace);
  });
}

}  // namespace lmdecode::LMD_SIMD::sampling
