// Launches merge_attention_states: no allocation and no wait, so that a CUDA graph can capture it.
#include "attention/merge_attention_states_kernel.cuh"
#include "common/cuda_launch.h"

namespace lmdecode::attention {
namespace {

template <class T>
void launch(const MergeAttentionStatesParams& params, void* stream) {
  using namespace cuda_tuning;
  constexpr int64_t kRows = kMergeThreads / cuda::kWarpSize;
  launch_kernel("merge_attention_states", &cuda_kernels::merge_attention_states_kernel<T>,
                {(params.rows() + kRows - 1) / kRows, kMergeThreads}, stream, params);
}

}  // namespace

void merge_attention_states_cuda(const MergeAttentionStatesParams& params, void* stream) {
  if (params.rows() == 0) return;
  switch (params.dtype) {
    case DType::kFloat32:
      return launch<float>(params, stream);
    case DType::kFloat16:
      return launch<Half>(params, stream);
    case DType::kBFloat16:
      return launch<BFloat16>(params, stream);
  }
}

}  // namespace lmdecode::attention
