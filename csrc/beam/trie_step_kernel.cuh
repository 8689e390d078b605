// trie_step on a GPU: a thread a node.
#pragma once

#include "beam/beam_tuning.h"
#include "beam/trie_step.h"
#include "common/cuda_intrinsics.cuh"

namespace lmdecode::beam::cuda_kernels {

inline __global__ void __launch_bounds__(tuning::kStepThreads)
    trie_step_kernel(const LMD_KERNEL_PARAM TrieStepParams params) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < params.size;
       i += threads) {
    params.step(i);
  }
}

}  // namespace lmdecode::beam::cuda_kernels
