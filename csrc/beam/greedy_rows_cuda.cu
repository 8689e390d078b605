// Launches the choice of rows without beams.
#include "beam/dtype_launch.h"
#include "beam/greedy_rows_kernel.cuh"
#include "sampling/row_launch.h"

namespace lmdecode::beam {
namespace {

template <class T>
void launch(const ProcessedParams& params, cudaStream_t stream) {
  launch_rows("beam_search_step_", &cuda_kernels::greedy_row_kernel<T>, params.call.rows,
              params.call.vocab, sizeof(T), params, stream);
}

}  // namespace

void greedy_rows_cuda(const LogSoftmaxTopKParams& params, const LogitsProcessors& processors,
                      float* values, void* stream) {
  const ProcessedParams all{params, processors, values};
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  launch_of_dtype(params.dtype, [&]<class T>() { launch<T>(all, cuda_stream); });
}

}  // namespace lmdecode::beam
