// Launches a step of beam searches: no allocation and no wait, so that a CUDA graph can capture it.
#include "beam/request_launch.h"
#include "beam/search_step_kernel.cuh"

namespace lmdecode::beam {
namespace {

constexpr const char* kOp = "beam_search_step_";

struct CudaLaunches {
  void* stream;

  void store_tries(const TokenTrie* tries, int64_t count, TokenTrie* to) const {
    using cuda_kernels::TrieList;
    for (int64_t first = 0; first < count; first += TrieList::kMost) {
      launch_kernel(kOp, &cuda_kernels::store_tries_kernel, {1, TrieList::kMost}, stream,
                    TrieList(tries + first, count - first), to + first);
    }
  }

  void tables(const SearchPass& pass) const {
    launch_kernel(kOp, &cuda_kernels::search_tables_kernel, {pass.count, tuning::kStepThreads},
                  stream, pass);
  }

  void free_rows(const LogSoftmaxTopKParams& top, const LogitsProcessors* processors,
                 float* values) const {
    log_softmax_top_k_rows_cuda(top, processors, values, stream);
  }
  void held_rows(const LogSoftmaxTopKParams& top, const LogitsProcessors& processors,
                 float* values) const {
    log_softmax_top_k_trie_rows_cuda(top, processors, values, stream);
  }
  void greedy_rows(const LogSoftmaxTopKParams& top, const LogitsProcessors& processors,
                   float* values) const {
    greedy_rows_cuda(top, processors, values, stream);
  }
  void requests(const LogSoftmaxTopKParams& top) const {
    log_softmax_top_k_requests_cuda(top, stream);
  }

  void step(const SearchPass& pass, const BeamStepParams& step) const {
    launch_kernel(kOp, &cuda_kernels::search_step_kernel,
                  {pass.count, tuning::kStepThreads, step_shared_bytes(step.state)}, stream, pass,
                  step);
  }

  static size_t step_shared_bytes(const BeamSearchState& state) {
    return cuda_kernels::beam_step_shared_bytes(state.beams, state.hypotheses);
  }
};

}  // namespace

size_t search_step_cuda_workspace_bytes(const SearchStepSizes& sizes) {
  return CudaWorkspace{}.split(sizes, nullptr);
}

void search_step_cuda(const SearchStepParams& params, const SearchStepSizes& sizes, void* workspace,
                      void* stream) {
  check_shared_bytes(kOp, CudaLaunches::step_shared_bytes(params.state), kStepTakes, params.state);
  launch_search_step(params, sizes, workspace, CudaLaunches{stream});
}

}  // namespace lmdecode::beam
