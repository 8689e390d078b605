// The kernels of a step of beam searches on a GPU, in addition to log_softmax_top_k's: before the
// candidates of a pass, a block for each search writes its tables; after them, a block for each
// search completes them and continues as beam_step. docs/reference/beam.md has the semantics.
#pragma once

#include "beam/beam_step_kernel.cuh"
#include "beam/search_pass.h"

namespace lmdecode::beam::cuda_kernels {

// Tries passed as a kernel parameter, not copied from host memory, so that a CUDA graph keeps them.
struct TrieList {
  static constexpr int64_t kMost = 64;
  TokenTrie tries[kMost];
  int64_t count;

  // Takes the first `size` tries, at most kMost.
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

namespace lmdecode::beam {

// The launches of a step of beam searches, in their order. Launches has one method a launch: by the
// CUDA runtime (search_step_cuda.cu), or by the emulation in tests.

// The workspace of all passes, which run one after the other.
struct CudaWorkspace : PassTables {
  TokenTrie* all_tries;  // [num_tries]
  float* values;         // [rows, vocab] with rules

  // Returns the bytes; with null for the memory it only counts them.
  size_t split(const SearchStepSizes& s, void* memory) {
    SplitMemory block(memory);
    PassTables::split(s, &block);
    block.take(&free_beam_scores, s.num_tries > 0 ? s.rows : 0);
    block.take(&all_tries, s.num_tries);
    block.take(&values, s.has_rules ? s.rows * s.vocab : 0);
    if (s.num_tries == 0) free_beam_scores = nullptr;
    return block.used();
  }
};

template <class Launches>
void launch_candidates(const SearchPass& pass, float* values, const Launches& launches) {
  const RulesOfPass on = possible_rules(pass.step, pass.num_earlier);
  LogSoftmaxTopKParams top = pass.top_k();
  const LogitsProcessors processors = pass.processors(on);
  if (pass.step.greedy) return launches.greedy_rows(top, processors, values);
  // The first kernels skip rows with a trie, the second ones all other rows.
  LogitsProcessors free_processors = processors;
  free_processors.tries = {};
  if (pass.tables.free_beam_scores != nullptr) top.beam_scores = pass.tables.free_beam_scores;
  launches.free_rows(top, on.any_but_tries() ? &free_processors : nullptr, values);
  if (pass.tables.free_beam_scores != nullptr) {
    top.beam_scores = pass.tables.beam_scores;
    launches.held_rows(top, processors, values);
  }
  launches.requests(top);
}

// params.token_rules.tries: on the host.
template <class Launches>
void launch_search_step(const SearchStepParams& params, const SearchStepSizes& sizes,
                        void* workspace, const Launches& launches) {
  CudaWorkspace w{};
  w.split(sizes, workspace);
  SearchPass pass{params, w};
  TokenRules& rules = pass.step.token_rules;
  launches.store_tries(rules.tries, rules.num_tries, w.all_tries);
  rules.tries = w.all_tries;
  for (int64_t i = 0; i < params.num_passes; ++i) {
    pass.count = params.passes[i].searches;
    pass.rows = params.passes[i].rows;
    pass.num_earlier = params.passes[i].num_earlier;
    if (pass.count > 0) {
      launches.tables(pass);
      launch_candidates(pass, w.values, launches);
      launches.step(pass, pass.beam_step());
    }
    pass.begin += pass.count;
  }
}

}  // namespace lmdecode::beam
