// Launches top_k_top_p_sample.
#include "sampling/row_launch.h"
#include "sampling/top_k_top_p_sample.h"
#include "sampling/top_k_top_p_sample_kernel.cuh"

namespace lmdecode::sampling {
namespace {

template <class T>
void launch(const TopKTopPSampleParams& params, cudaStream_t stream) {
  launch_rows("top_k_top_p_sample", &cuda_kernels::top_k_top_p_sample_kernel<T>, params.batch,
              params.vocab, sizeof(T), params, stream);
}

}  // namespace

void top_k_top_p_sample_cuda(const TopKTopPSampleParams& params, void* stream) {
  if (params.batch == 0) return;
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  switch (params.dtype) {
    case DType::kFloat32:
      return launch<float>(params, cuda_stream);
    case DType::kFloat16:
      return launch<Half>(params, cuda_stream);
    case DType::kBFloat16:
      return launch<BFloat16>(params, cuda_stream);
  }
}

}  // namespace lmdecode::sampling
