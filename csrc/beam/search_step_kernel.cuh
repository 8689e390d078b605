// The kernels of a step of beam searches on a GPU, beside those of log_softmax_top_k: before the
// candidates of a pass, a block a search writes its tables; behind them, a block a search completes
// them and goes on as beam_step does. docs/reference/beam.md has the semantics.
#pragma once

#include "beam/beam_step_kernel.cuh"
#include "beam/search_pass.h"

namespace lmdecode::beam::cuda_kernels {

// Some tries, which go to the device as the parameter of a kernel: nothing is copied from memory of
// the host, so that a CUDA graph keeps them.
struct TrieList {
  static constexpr int64_t kMost = 64;
  TokenTrie tries[kMost];
  int64_t count;

  // The first of so many.
  TrieList(const TokenTrie* from, int64_t size) : count(size < kMost ? size : kMost) {
    for (int64_t i = 0; i < count; ++i) tries[i] = from[i];
  }
};

inline __global__ void __launch_bounds__(TrieList::kMost)
    store_tries_kernel(const LMD_KERNEL_PARAM TrieList list, TokenTrie* to) {
  if (threadIdx.x < list.count) to[threadIdx.x] = list.tries[threadIdx.x];
}

inline __global__ void __launch_bounds__(tuning::kStepThreads)
    search_tables_kernel(const LMD_KERNEL_PARAM SearchPass pass) {
  const Columns columns{threadIdx.x, blockDim.x};
  for (int64_t i = blockIdx.x; i < pass.count; i += gridDim.x) pass.write_search(i, columns);
  // Each row of the pass, whether a search has it or not: it is read.
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t row = first; row < pass.rows; row += threads) {
    pass.write_row(row, pass.search_of_row(row));
  }
}

// step: pass.beam_step()
inline __global__ void __launch_bounds__(tuning::kStepThreads)
    search_step_kernel(const LMD_KERNEL_PARAM SearchPass pass,
                       const LMD_KERNEL_PARAM BeamStepParams step) {
  BeamStepStorage& storage = cuda::shared_storage<BeamStepStorage>();
  const Columns columns{threadIdx.x, blockDim.x};
  for (int64_t i = blockIdx.x; i < pass.count; i += gridDim.x) {
    step_request(step, i, storage, columns, [&] { pass.complete_candidates(i); });
    pass.end_search(i, columns);
    __syncthreads();  // the next plan takes the place of this one
  }
}

}  // namespace lmdecode::beam::cuda_kernels
