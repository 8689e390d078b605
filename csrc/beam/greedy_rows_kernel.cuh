// The next tokens of rows without beams on a GPU: the largest logit of each row after the
// processors, which here act on logits. beam/greedy_choice.h has the same on the CPU. Tokens are
// equal; log-probabilities are log_softmax_top_k's, before the processors.
#pragma once

#include "beam/processor_rows_kernel.cuh"

namespace lmdecode::beam::cuda_kernels {

struct RawLogit {
  __device__ float log_prob(float logit) const { return logit; }
};

// A request has one row, and one candidate.
template <class T>
class GreedyRow : private RowProcessing<T> {
 public:
  using RowProcessing<T>::RowProcessing;

  __device__ void run(int64_t row) {
    const LogSoftmaxTopKParams& call = this->params_;
    this->row_ = row;
    RowSlice<T> slice(static_cast<const T*>(call.logits) + call.logits_of(row),
                      call.logits_vocab_stride, this->vocab_, this->cluster_.rank(), this->launch_,
                      reinterpret_cast<unsigned char*>(&this->cluster_.storage() + 1));
    const Scan scan = this->load(slice);
    const float top = value_of_key(static_cast<uint32_t>(scan.max_key));
    if (scan.has_nan) {
      write({kBeamStatusNan, 0}, 0.0f);
    } else {
      const Choice choice = choose(slice);
      // NaN where a token is forced on a row without a logit above -inf, as on the CPU.
      float log_prob = float_of(0x7fc00000u);
      if (top > minus_infinity()) {
        log_prob = this->score_of(slice, top, 0.0f).log_prob(slice.of_row(choice.token));
      }
      write(choice, log_prob);
    }
    this->cluster_.sync();
  }

 private:
  using Scan = typename RowCandidates<T>::Scan;
  struct Choice {
    uint8_t status;
    uint32_t token;
  };

  __device__ Choice choose(const RowSlice<T>& slice) {
    const RowProcessors p = this->processors();
    if (p.forced_token >= 0) {
      const bool is_banned = p.forced_log_prob() < 0.0f;
      return {is_banned ? kBeamStatusEmpty : uint8_t{0}, static_cast<uint32_t>(p.forced_token)};
    }
    Scan best{0, 0};  // the key of a value, and below it which of equal ones comes first
    const auto see = [&](float value, uint32_t token) {
      const Word at = Word{order_key(value + 0.0f)} << 32 | (0xffffffffu - token);
      best.max_key = at > best.max_key ? at : best.max_key;
      best.has_nan |= value != value;
    };
    if (p.changes_values()) {
      this->template process<WholeRow>(slice, RawLogit{});
      const float* const values = this->values();
      for (uint32_t i = threadIdx.x; i < slice.size(); i += blockDim.x) {
        see(values[slice.begin() + i], slice.begin() + i);
      }
    } else {
      slice.each(see);
    }
    best = this->cluster_.reduce(best, [](const Scan& a, const Scan& b) {
      return Scan{a.max_key > b.max_key ? a.max_key : b.max_key, a.has_nan | b.has_nan};
    });
    if (best.has_nan) return {kBeamStatusNan, 0};
    const float value = value_of_key(static_cast<uint32_t>(best.max_key >> 32));
    if (!(value > minus_infinity())) return {kBeamStatusEmpty, 0};
    return {0, 0xffffffffu - static_cast<uint32_t>(best.max_key)};
  }

  __device__ void write(Choice choice, float log_prob) const {
    if (this->cluster_.rank() != 0 || threadIdx.x != 0) return;
    const LogSoftmaxTopKParams& call = this->params_;
    const int64_t request = call.request_of(this->row_);
    const bool failed = choice.status != 0;
    call.status[request] = choice.status;
    call.tokens[request] = failed ? 0 : choice.token;
    call.beams[request] = 0;
    call.log_probs[request] = failed ? 0.0f : log_prob;
    call.scores[request] = failed
                               ? minus_infinity()
                               : call.beam_scores[this->row_ * call.beam_scores_stride] + log_prob;
  }
};

template <class T>
__global__ void __launch_bounds__(sampling::cuda_tuning::kMaxThreads)
    greedy_row_kernel(const LMD_KERNEL_PARAM ProcessedParams params,
                      const LMD_KERNEL_PARAM SamplingLaunchPlan plan) {
  GreedyRow<T> rows(params, plan, cuda::shared_storage<RowStorage>());
  for (int64_t row = blockIdx.x / plan.cluster_size; row < params.call.rows; row += plan.clusters) {
    rows.run(row);
  }
}

}  // namespace lmdecode::beam::cuda_kernels
