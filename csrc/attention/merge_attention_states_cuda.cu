// Launches merge_attention_states: no allocation and no wait, so that a CUDA graph can capture it.
#include "attention/merge_attention_states_kernel.cuh"
#include "common/cuda_launch.h"

namespace lmdecode::attention {
namespace {

template <class T>
void launch(const MergeAttentionStatesParams& params, cudaStream_t stream) {
  constexpr const char* kOp = "merge_attention_states";
  using namespace cuda_tuning;
  constexpr int64_t kRows = kMergeThreads / cuda::kWarpSize;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid_of((params.rows() + kRows - 1) / kRows));
  config.blockDim = dim3(kMergeThreads);
  config.stream = stream;
  check_cuda(kOp,
             cudaLaunchKernelEx(&config, &cuda_kernels::merge_attention_states_kernel<T>, params),
             "launch");
}

}  // namespace

void merge_attention_states_cuda(const MergeAttentionStatesParams& params, void* stream) {
  if (params.rows() == 0) return;
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  switch (params.dtype) {
    case DType::kFloat32:
      return launch<float>(params, on);
    case DType::kFloat16:
      return launch<Half>(params, on);
    case DType::kBFloat16:
      return launch<BFloat16>(params, on);
  }
}

}  // namespace lmdecode::attention
