// Launches log_softmax_top_k: the rows, then the requests.
#include "beam/beam_tuning.h"
#include "beam/dtype_launch.h"
#include "beam/log_softmax_top_k.h"
#include "beam/log_softmax_top_k_kernel.cuh"
#include "beam/processor_rows_kernel.cuh"
#include "sampling/row_launch.h"

namespace lmdecode::beam {
namespace {

constexpr const char* kOp = "log_softmax_top_k";

template <class T>
void launch(const LogSoftmaxTopKParams& params, cudaStream_t stream) {
  launch_rows(kOp, &cuda_kernels::log_softmax_top_k_row_kernel<T>, params.rows, params.vocab,
              sizeof(T), params, stream);
}

template <class T>
void launch(const ProcessedParams& params, cudaStream_t stream) {
  const LogSoftmaxTopKParams& call = params.call;
  launch_rows(kOp, &cuda_kernels::processor_row_kernel<T>, call.rows, call.vocab, sizeof(T), params,
              stream);
  launch_rows(kOp, &cuda_kernels::processed_row_kernel, call.rows, call.vocab, sizeof(float),
              params, stream);
}

template <class Params>
void launch(DType dtype, const Params& params, cudaStream_t stream) {
  launch_of_dtype(dtype, [&]<class T>() { launch<T>(params, stream); });
}

}  // namespace

void log_softmax_top_k_rows_cuda(const LogSoftmaxTopKParams& params,
                                 const LogitsProcessors* processors, float* values, void* stream) {
  if (params.rows == 0) return;
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  if (processors == nullptr) {
    launch(params.dtype, params, cuda_stream);
  } else {
    launch(params.dtype, ProcessedParams{params, *processors, values}, cuda_stream);
  }
}

void log_softmax_top_k_requests_cuda(const LogSoftmaxTopKParams& params, void* stream) {
  if (params.requests == 0) return;
  launch_kernel(
      kOp, &cuda_kernels::log_softmax_top_k_request_kernel,
      {params.requests, tuning::kMergeThreads, sizeof(sampling::cuda_kernels::RowStorage)}, stream,
      params);
}

void log_softmax_top_k_cuda(const LogSoftmaxTopKParams& params, const LogitsProcessors* processors,
                            float* values, void* stream) {
  if (params.requests == 0) return;
  if (processors != nullptr && processors->tries.value.tokens != nullptr) {
    log_softmax_top_k_trie_rows_cuda(params, *processors, values, stream);
  } else {
    log_softmax_top_k_rows_cuda(params, processors, values, stream);
  }
  log_softmax_top_k_requests_cuda(params, stream);
}

}  // namespace lmdecode::beam
