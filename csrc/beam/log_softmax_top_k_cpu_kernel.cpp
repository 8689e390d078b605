// Compiled once for each CPU capability, with LMD_SIMD naming it.
#include "beam/log_softmax_top_k_cpu_kernel.h"

#include "beam/log_softmax_top_k.h"
#include "sampling/sampling_workspace.h"

namespace lmdecode::LMD_SIMD::beam {

using namespace lmdecode::beam;
using lmdecode::sampling::SamplingWorkspace;
using lmdecode::sampling::split_sampling_workspace;

namespace {

template <class T>
void run_rows(const LogSoftmaxTopKParams& params, int64_t begin, int64_t end, void* workspace) {
  const SamplingWorkspace w = split_sampling_workspace(workspace, params.vocab);
  float* maxima = reinterpret_cast<float*>(w.spare_key);  // the searches here leave it alone
  const T* logits = static_cast<const T*>(params.logits);
  if (params.logits_vocab_stride == 1) {
    RowCandidates<T> candidates(params, list_in(w), maxima);
    for (int64_t row = begin; row < end; ++row)
      candidates.run(logits + params.logits_of(row), row,
                     row + 1 < end ? logits + params.logits_of(row + 1) : nullptr);
    return;
  }
  RowCandidates<float> candidates(params, list_in(w), maxima);
  for (int64_t row = begin; row < end; ++row) {
    if (is_alive(params.beam_scores[row * params.beam_scores_stride])) {
      gather_row(logits + params.logits_of(row), params.vocab, params.logits_vocab_stride, w.row);
    }
    candidates.run(w.row, row, nullptr);
  }
}

}  // namespace

void log_softmax_top_k_rows(const LogSoftmaxTopKParams& params, int64_t begin, int64_t end,
                            void* workspace) {
  with_element_type(params.dtype, [&](auto element) {
    run_rows<decltype(element)>(params, begin, end, workspace);
  });
}

void log_softmax_top_k_requests(const LogSoftmaxTopKParams& params, int64_t begin, int64_t end,
                                int64_t size, void* workspace) {
  RequestMerge merge(params, list_in(split_sampling_workspace(workspace, size)));
  for (int64_t request = begin; request < end; ++request) merge.run(request);
}

}  // namespace lmdecode::LMD_SIMD::beam
