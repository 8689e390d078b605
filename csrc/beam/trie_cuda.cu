// Launches trie_step and the rows of log_softmax_top_k that a trie restricts. No launch allocates
// or waits, so a CUDA graph can capture it.
#include "beam/dtype_launch.h"
#include "beam/log_softmax_top_k.h"
#include "beam/trie_kernel.cuh"
#include "common/cuda_launch.h"
#include "sampling/row_launch.h"

namespace lmdecode::beam {
namespace {

constexpr const char* kOp = "log_softmax_top_k";

template <class T>
void launch(const ProcessedParams& params, cudaStream_t stream) {
  const LogSoftmaxTopKParams& call = params.call;
  launch_rows(kOp, &cuda_kernels::trie_processor_row_kernel<T>, call.rows, call.vocab, sizeof(T),
              params, stream);
  launch_rows(kOp, &cuda_kernels::trie_row_kernel, call.rows, call.vocab, sizeof(float), params,
              stream);
}

}  // namespace

void log_softmax_top_k_trie_rows_cuda(const LogSoftmaxTopKParams& params,
                                      const LogitsProcessors& processors, float* values,
                                      void* stream) {
  if (params.rows == 0) return;
  const ProcessedParams all{params, processors, values};
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  launch_of_dtype(params.dtype, [&]<class T>() { launch<T>(all, cuda_stream); });
}

void trie_step_cuda(const TrieStepParams& params, void* stream) {
  if (params.size == 0) return;
  const int64_t blocks = (params.size + tuning::kStepThreads - 1) / tuning::kStepThreads;
  launch_kernel("trie_step", &cuda_kernels::trie_step_kernel, {blocks, tuning::kStepThreads},
                stream, params);
}

}  // namespace lmdecode::beam
