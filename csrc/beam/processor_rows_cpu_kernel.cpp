// Compiled once for each CPU capability, with LMD_SIMD naming it.
#include "beam/processor_rows_cpu_kernel.h"

#include "beam/log_softmax_top_k.h"
#include "sampling/sampling_workspace.h"

namespace lmdecode::LMD_SIMD::beam {

using namespace lmdecode::beam;
using lmdecode::sampling::sampling_workspace_capacity;
using lmdecode::sampling::SamplingWorkspace;
using lmdecode::sampling::split_sampling_workspace;

namespace {

template <class T>
void run_rows(const LogSoftmaxTopKParams& params, const LogitsProcessors& processors,
              int64_t max_edits, int64_t begin, int64_t end, void* workspace) {
  const SamplingWorkspace w = split_sampling_workspace(workspace, params.vocab);
  const CandidateList list = list_in(w);
  float* maxima = reinterpret_cast<float*>(w.spare_key);  // the searches here leave it alone
  TokenEdits edits(w.row + sampling_workspace_capacity(params.vocab), max_edits, params.vocab);
  const T* logits = static_cast<const T*>(params.logits);
  const auto processors_of = [&](int64_t row) {
    return processors_of_row(processors, params.request_of(row), row, params.vocab);
  };
  if (params.logits_vocab_stride == 1) {
    ProcessedRowCandidates<T> candidates(params, list, maxima, w.row, &edits);
    for (int64_t row = begin; row < end; ++row)
      candidates.run(logits + params.logits_of(row), processors_of(row), row,
                     row + 1 < end ? logits + params.logits_of(row + 1) : nullptr);
    return;
  }
  ProcessedRowCandidates<float> candidates(params, list, maxima, w.row, &edits);
  for (int64_t row = begin; row < end; ++row) {
    if (is_alive(params.beam_scores[row * params.beam_scores_stride])) {
      gather_row(logits + params.logits_of(row), params.vocab, params.logits_vocab_stride, w.row);
    }
    candidates.run(w.row, processors_of(row), row, nullptr);
  }
}

}  // namespace

// Rows [begin, end): each to its part of the scratch. `workspace` has sampling_workspace_bytes() of
// the vocabulary and, behind them, TokenEdits::bytes(max_edits, vocab); aligned to 64.
void log_softmax_top_k_processed_rows(const LogSoftmaxTopKParams& params,
                                      const LogitsProcessors& processors, int64_t max_edits,
                                      int64_t begin, int64_t end, void* workspace) {
  with_element_type(params.dtype, [&](auto element) {
    run_rows<decltype(element)>(params, processors, max_edits, begin, end, workspace);
  });
}

}  // namespace lmdecode::LMD_SIMD::beam
