// Launches trie_step: no allocation and no wait, so that a CUDA graph can capture it.
#include "beam/trie_step_kernel.cuh"
#include "common/cuda_launch.h"

namespace lmdecode::beam {

void trie_step_cuda(const TrieStepParams& params, void* stream) {
  if (params.size == 0) return;
  const int64_t blocks = (params.size + tuning::kStepThreads - 1) / tuning::kStepThreads;
  launch_kernel("trie_step", &cuda_kernels::trie_step_kernel, {blocks, tuning::kStepThreads},
                stream, params);
}

}  // namespace lmdecode::beam
