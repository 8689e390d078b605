// The rows of log_softmax_top_k that a trie restricts, on a GPU: one kernel reads each row for its
// sum and writes the processed values of the allowed tokens side by side; a second finds the best
// of these. Other tokens, and rows of requests without a trie, are neither read nor written.
// Results equal the CPU's bit for bit.
#pragma once

#include "beam/beam_tuning.h"
#include "beam/processor_rows_kernel.cuh"
#include "beam/trie_step.h"
#include "common/cuda_intrinsics.cuh"

namespace lmdecode::beam::cuda_kernels {

// The i-th token that the trie allows has the i-th value. Where a token is forced, there is one
// value, its own.
class AllowedTokens {
 public:
  // A trie has no more than `vocab` tokens below vocab; of arrays that are none the rest is left.
  __device__ AllowedTokens(const RowProcessors& p, int64_t vocab)
      : p_(p), vocab_(vocab), allowed_(p.allowed_tokens.size) {
    if (allowed_ > vocab) allowed_ = vocab;
  }

  __device__ int64_t size() const { return p_.forced_token >= 0 ? 1 : allowed_; }
  __device__ uint32_t token(int64_t place) const {
    return static_cast<uint32_t>(p_.forced_token >= 0 ? p_.forced_token : p_.allowed_tokens[place]);
  }
  __device__ int64_t place(int64_t token) const {
    return place_of(p_.allowed_tokens.data, allowed_, token);
  }

  template <class T, class ValueOf>
  __device__ void write(const RowSlice<T>& slice, float* values, int64_t thread, int64_t threads,
                        ValueOf value) const {
    for (int64_t i = thread; i < allowed_; i += threads) {
      const int64_t token = p_.allowed_tokens[i];
      const bool is_token = token >= 0 && token < vocab_;
      const uint32_t at = static_cast<uint32_t>(token);
      values[i] = is_token ? value(slice.of_row(at), at) : minus_infinity();
    }
    if (p_.forced_token >= 0 && thread == 0) values[0] = p_.forced_log_prob();
  }

 private:
  const RowProcessors& p_;
  int64_t vocab_, allowed_;
};

template <class T>
class TrieRowProcessing : private RowProcessing<T> {
 public:
  using RowProcessing<T>::RowProcessing;

  // The values of a row, and its status so far.
  __device__ void run(int64_t row) {
    this->row_ = row;
    const RowProcessors p = this->processors();
    if (!p.has_trie) return;
    const float beam_score = this->params_.beam_scores[row * this->params_.beam_scores_stride];
    const uint32_t status = beam_score_status(beam_score);
    const bool goes_on = AllowedTokens(p, this->params_.vocab).size() > 0;
    if (status != 0 || !(beam_score > kRealBeamScoreBound) || !goes_on) {
      return this->finish(0, status | kRowHasTrie);
    }
    this->template run_on<AllowedTokens>(beam_score, kRowHasTrie);
  }
};

// The best of the values of each row.
class TrieRowCandidates : private RowCandidates<float> {
 public:
  __device__ TrieRowCandidates(const ProcessedParams& params, const SamplingLaunchPlan& plan,
                               RowStorage& storage)
      : RowCandidates<float>(params.call, plan, storage), all_(params) {}

  __device__ void run(int64_t row) {
    row_ = row;
    const float beam_score = params_.beam_scores[row * params_.beam_scores_stride];
    if (!(beam_score > kRealBeamScoreBound) || *params_.row_status(row) != kRowHasTrie) return;
    const RowProcessors p =
        processors_of_row(all_.processors, params_.request_of(row), row, params_.vocab);
    const AllowedTokens allowed(p, params_.vocab);
    if (allowed.size() == 0) return;
    vocab_ = static_cast<uint32_t>(allowed.size());
    SamplingLaunchPlan plan = launch_;  // its slices divide the vocabulary
    plan.slice = ((vocab_ + plan.cluster_size - 1) / plan.cluster_size + 15) / 16 * 16;
    if (plan.cached > plan.slice) plan.cached = plan.slice;
    RowSlice<float> slice(all_.values + row * params_.vocab, 1, vocab_, cluster_.rank(), plan,
                          reinterpret_cast<unsigned char*>(&cluster_.storage() + 1));
    const float top = value_of_key(static_cast<uint32_t>(load(slice).max_key));
    if (top > minus_infinity()) {
      const ProcessedScore score{top, beam_score};
      write(
          slice, score, best_of(slice, score), [&](uint32_t place) { return allowed.token(place); },
          kRowHasTrie);
    }
    cluster_.sync();
  }

 private:
  const ProcessedParams& all_;
};

template <class T>
__global__ void __launch_bounds__(sampling::cuda_tuning::kMaxThreads)
    trie_processor_row_kernel(const LMD_KERNEL_PARAM ProcessedParams params,
                              const LMD_KERNEL_PARAM SamplingLaunchPlan plan) {
  TrieRowProcessing<T> rows(params, plan, cuda::shared_storage<RowStorage>());
  for (int64_t row = blockIdx.x / plan.cluster_size; row < params.call.rows; row += plan.clusters) {
    rows.run(row);
  }
}

inline __global__ void __launch_bounds__(sampling::cuda_tuning::kMaxThreads)
    trie_row_kernel(const LMD_KERNEL_PARAM ProcessedParams params,
                    const LMD_KERNEL_PARAM SamplingLaunchPlan plan) {
  TrieRowCandidates candidates(params, plan, cuda::shared_storage<RowStorage>());
  for (int64_t row = blockIdx.x / plan.cluster_size; row < params.call.rows; row += plan.clusters) {
    candidates.run(row);
  }
}

// trie_step: a thread a node.

inline __global__ void __launch_bounds__(tuning::kStepThreads)
    trie_step_kernel(const LMD_KERNEL_PARAM TrieStepParams params) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < params.size;
       i += threads) {
    params.step(i);
  }
}

}  // namespace lmdecode::beam::cuda_kernels
