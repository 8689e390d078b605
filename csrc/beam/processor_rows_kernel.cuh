// The rows of log_softmax_top_k with processors on a GPU: one kernel writes the processed
// log-probabilities of all rows, a second finds each row's best among them, as
// log_softmax_top_k_kernel.cuh does among logits. Results equal the CPU's bit for bit.
#pragma once

#include "beam/log_softmax_top_k_kernel.cuh"
#include "beam/logits_processors.h"

namespace lmdecode::beam {

struct ProcessedParams {
  LogSoftmaxTopKParams call;
  LogitsProcessors processors;
  float* values;  // [rows, vocab] scratch: log-probabilities
};

namespace cuda_kernels {

// Where the value of a token lies: here each token has one, its own.
class WholeRow {
 public:
  __device__ WholeRow(const RowProcessors&, int64_t) {}

  // value(logit, token) of each token to its place; thread of `threads`, all of them call.
  template <class T, class ValueOf>
  __device__ void write(const RowSlice<T>& slice, float* values, int64_t, int64_t,
                        ValueOf value) const {
    slice.write(values, minus_infinity(), value);
  }

  // Below 0: nowhere.
  __device__ int64_t place(int64_t token) const { return token; }
};

// Tokens that several rules name get the value of the last of them: rules take turns, with a
// barrier between, and each computes it from the logit and everything that came before. A rule may
// name a token twice, then the same value is written twice.
template <class T>
class RowProcessing : protected RowCandidates<T> {
 public:
  __device__ RowProcessing(const ProcessedParams& params, const SamplingLaunchPlan& plan,
                           RowStorage& storage)
      : RowCandidates<T>(params.call, plan, storage), all_(params) {}

  // The values of a row, and its status so far.
  __device__ void run(int64_t row) {
    const LogSoftmaxTopKParams& call = this->params_;
    this->row_ = row;
    const float beam_score = call.beam_scores[row * call.beam_scores_stride];
    const uint8_t status = beam_score_status(beam_score);
    if (status != 0 || !is_alive(beam_score)) return this->finish(0, status);
    run_on<WholeRow>(beam_score, 0);
  }

 protected:
  // flags: bits of the row's status besides its failures.
  template <class Places>
  __device__ void run_on(float beam_score, uint32_t flags) {
    const LogSoftmaxTopKParams& call = this->params_;
    RowSlice<T> slice(static_cast<const T*>(call.logits) + call.logits_of(this->row_),
                      call.logits_vocab_stride, this->vocab_, this->cluster_.rank(), this->launch_,
                      reinterpret_cast<unsigned char*>(&this->cluster_.storage() + 1));
    const typename RowCandidates<T>::Scan scan = this->load(slice);
    const float top = value_of_key(static_cast<uint32_t>(scan.max_key));
    if (scan.has_nan) {
      this->finish(0, kBeamStatusNan | flags);
    } else if (!(top > minus_infinity())) {
      this->finish(0, kBeamStatusEmpty | flags);
    } else {
      const bool has_nan = process<Places>(slice, this->score_of(slice, top, beam_score));
      this->finish(0, (has_nan ? kBeamStatusNan : 0) | flags);
    }
    this->cluster_.sync();
  }

  __device__ RowProcessors processors() const {
    return processors_of_row(all_.processors, this->params_.request_of(this->row_), this->row_,
                             this->params_.vocab);
  }

  __device__ float* values() const { return all_.values + this->row_ * this->params_.vocab; }

  // Writes the row of values; whether a NaN came of the processors, for all threads. score: its
  // They act on log_prob(logit).
  template <class Places, class Score>
  __device__ bool process(const RowSlice<T>& slice, const Score& score) {
    const RowProcessors p = processors();
    const Places places(p, this->params_.vocab);
    float* const values = this->values();
    const bool forced = p.forced_token >= 0;
    const float forced_log_prob = forced ? p.forced_log_prob() : 0.0f;
    bool has_nan = false;
    places.write(slice, values, thread(), threads(), [&](float logit, uint32_t token) {
      const float value = p.adjusted(score.log_prob(logit), token, 0, false);
      has_nan |= value != value;
      if (forced) return token == p.forced_token ? forced_log_prob : minus_infinity();
      return p.allows(token) ? value : minus_infinity();
    });
    this->cluster_.sync();

    const auto put = [&](int64_t token, float value) {
      const int64_t place = places.place(token);
      if (place < 0) return;
      has_nan |= value != value;
      if (forced) return;
      const float allowed = p.allows(token) ? value : minus_infinity();
      atomicExch(reinterpret_cast<unsigned*>(values + place), bits_of(allowed));
    };
    const auto adjust = [&](int64_t token, bool repeated) {
      int64_t occurrences = 0;
      for (int64_t i = 0; i < p.diversity_tokens.size; ++i)
        occurrences += p.diversity_tokens[i] == token;
      const float logit = slice.of_row(static_cast<uint32_t>(token));
      put(token, p.adjusted(score.log_prob(logit), token, occurrences, repeated));
    };
    each_token(p.diversity_tokens, [&](int64_t token) { adjust(token, false); });
    this->cluster_.sync();
    if (p.penalizes_repetition())
      each_token(p.history, [&](int64_t token) { adjust(token, true); });
    this->cluster_.sync();
    const auto ban = [&](int64_t token) { put(token, minus_infinity()); };
    each_token(p.end_tokens, ban);
    each_token(p.suppressed_tokens, ban);
    const int64_t ngrams = p.ngram > 0 ? p.history.size - p.ngram + 1 : 0;
    for (int64_t start = thread(); start < ngrams; start += threads()) {
      const int64_t token = p.history[start + p.ngram - 1];
      if (is_token(token) && p.repeats_ngram(start)) ban(token);
    }
    using Scan = typename RowCandidates<T>::Scan;
    return this->cluster_
        .reduce(Scan{0, has_nan},
                [](const Scan& a, const Scan& b) { return Scan{0, a.has_nan | b.has_nan}; })
        .has_nan;
  }

 private:
  __device__ bool is_token(int64_t token) const { return token >= 0 && token < this->vocab_; }

  // Of the cluster.
  __device__ int64_t thread() const {
    return static_cast<int64_t>(this->cluster_.rank()) * blockDim.x + threadIdx.x;
  }
  __device__ int64_t threads() const {
    return static_cast<int64_t>(this->cluster_.size()) * blockDim.x;
  }

  template <class See>
  __device__ void each_token(const TensorRow<int64_t>& tokens, See see) const {
    for (int64_t i = thread(); i < tokens.size; i += threads()) {
      if (is_token(tokens[i])) see(tokens[i]);
    }
  }

  const ProcessedParams& all_;
};

// The best of each row of values.
class ProcessedRowCandidates : private RowCandidates<float> {
 public:
  __device__ ProcessedRowCandidates(const ProcessedParams& params, const SamplingLaunchPlan& plan,
                                    RowStorage& storage)
      : RowCandidates<float>(params.call, plan, storage), values_(params.values) {}

  __device__ void run(int64_t row) {
    row_ = row;
    const float beam_score = params_.beam_scores[row * params_.beam_scores_stride];
    if (!is_alive(beam_score) || *params_.row_status(row) != 0) return;
    RowSlice<float> slice(values_ + row * params_.vocab, 1, vocab_, cluster_.rank(), launch_,
                          reinterpret_cast<unsigned char*>(&cluster_.storage() + 1));
    const float top = value_of_key(static_cast<uint32_t>(load(slice).max_key));
    if (top > minus_infinity()) {
      const ProcessedScore score{top, beam_score};
      write(slice, score, best_of(slice, score));
    }
    cluster_.sync();
  }

 private:
  const float* values_;
};

template <class T>
__global__ void __launch_bounds__(sampling::cuda_tuning::kMaxThreads)
    processor_row_kernel(const LMD_KERNEL_PARAM ProcessedParams params,
                         const LMD_KERNEL_PARAM SamplingLaunchPlan plan) {
  RowProcessing<T> rows(params, plan, cuda::shared_storage<RowStorage>());
  for (int64_t row = blockIdx.x / plan.cluster_size; row < params.call.rows; row += plan.clusters) {
    rows.run(row);
  }
}

inline __global__ void __launch_bounds__(sampling::cuda_tuning::kMaxThreads)
    processed_row_kernel(const LMD_KERNEL_PARAM ProcessedParams params,
                         const LMD_KERNEL_PARAM SamplingLaunchPlan plan) {
  ProcessedRowCandidates candidates(params, plan, cuda::shared_storage<RowStorage>());
  for (int64_t row = blockIdx.x / plan.cluster_size; row < params.call.rows; row += plan.clusters) {
    candidates.run(row);
  }
}

}  // namespace cuda_kernels
}  // namespace lmdecode::beam
