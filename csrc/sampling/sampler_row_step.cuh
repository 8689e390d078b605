// A row of a Sampler on a GPU: what sampling/sampler_cpu_kernel.h is on the CPU, with the same
// results bit for bit. One block of threads works on a row; what depends on the text, and the
// state, is the work of its first thread, by the functions that the CPU has.
#pragma once

#include "sampling/sampler_row_draw.cuh"
#include "sampling/sampler_text_rules.h"
#include "sampling/sampler_workspace.h"

namespace lmdecode::sampling::cuda_kernels {

LMD_OUT_OF_LINE __device__ inline void apply_rules_of_text(const SamplerRowView& view,
                                                           const SamplerPenalties& penalties,
                                                           const TouchedLogits& logits) {
  text_rules::apply_text_rules(view, penalties, logits);
}

template <class T>
class CudaSamplerStep : private SamplerRowDraw {
 public:
  __device__ CudaSamplerStep(const SamplerStepParams& params, RowStorage& storage,
                             const SamplerBlockWorkspace& workspace)
      : SamplerRowDraw(params, storage, workspace.row), touched_(workspace.touched) {}

  struct Choice {
    int64_t token;
    uint8_t status;
  };

  // The same for all threads of the block, which all call it. x: the row's logits; bitmask: its
  // words, or null; drafted: to be accepted, or not, by the rule of rejection; null: a token is
  // drawn. tokens: how many this call and those after it may accept.
  LMD_OUT_OF_LINE __device__ Choice run(const T* x, int64_t row, const int32_t* bitmask,
                                        const DraftedToken* drafted, int64_t tokens) {
    raw_ = {x, params_.logits_vocab_stride, left_.vocab};
    row_ = row;
    bitmask_ = bitmask;
    drafted_ = drafted;
    drawn_ = false;
    status_ = 0;
    SamplerRowView view(params_.state + row * params_.layout.size, params_.layout);
    int32_t* const counts =
        params_.stage_counts ? params_.stage_counts + row * kSamplerStages : nullptr;
    for (int i = 0; counts && threadIdx.x == 0 && i < kSamplerStages; ++i) counts[i] = -1;
    if (!view.fits(params_.layout)) return finish_nothing(kStatusRefused);
    if (view.row->active == 0) return finish_nothing(kStatusNoSequence);
    if (params_.accept && !view.has_room(tokens)) return finish_nothing(kStatusRefused);
    const SamplerOrderRules rules =
        sampler_order_rules(static_cast<SamplerOrder>(view.row->integers.order));
    const RowParameters parameters =
        parameters_of_row(plain_params(*view.row, rules, n_), rules.dialect, 0);
    begin_stages(view.row, rules, parameters, counts);
    if (const int64_t forced = text_rules::forced_token(view); forced >= 0) {
      finish_one(static_cast<uint32_t>(forced), raw_.at(forced));
    } else {
      choose(view);
    }
    if (params_.num_logprobs >= 0) write_log_probs();
    __syncthreads();  // all have read the state
    if (threadIdx.x == 0) {
      params_.index[row_] = index_;
      params_.kept_count[row_] = static_cast<int32_t>(kept_);
      params_.status[row_] = status_;
      if (params_.accept) accept(&view);
    }
    __syncthreads();
    return {index_, status_};
  }

  // Index -1, and the row of the sampler is as it was.
  __device__ Choice refuse(int64_t row) {
    row_ = row;
    return finish_nothing(kStatusRefused);
  }

  // What the rule of rejection needs to know of a draft's logits, null where it was certain; so it
  // is too where they say nothing.
  __device__ DraftedToken drafted_token(int64_t token, const float* logits) {
    DraftedToken d{token, nullptr, {}, 1};
    if (logits == nullptr) return d;
    const RawRow<float> row{logits, 1, left_.vocab};
    const LargestLogit found = largest_of(row);
    if (!found.any) return d;
    d.logits = logits;
    d.rule = {found.max, exponent_factor(1.0f), mass_fraction_bits(n_),
              found.max == plus_infinity()};
    d.mass = total_of(row, d.rule);
    return d;
  }

 private:
  // ---- the edits

  __device__ bool allows(int64_t token) const {
    return bitmask_ == nullptr ||
           (static_cast<uint32_t>(bitmask_[token / 32]) >> (token % 32) & 1) != 0;
  }

  __device__ void edit(const SamplerRowView& view) {
    Number has_nan{0};
    raw_.each([&](float logit, uint32_t token) {
      const bool is_number = logit == logit;
      if (!is_number) has_nan.value = 1;
      left_.value[token] = is_number && allows(token) ? logit : minus_infinity();
    });
    has_nan =
        cluster_.reduce(has_nan, [](Number a, Number b) { return Number{a.value | b.value}; });
    if (has_nan.value != 0) status_ |= kStatusNan;
    const int64_t count = state_->touched;
    if (count == 0) return;
    const SamplerPenalties penalties = sampler_penalties(*state_, rules_);
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
      touched_.raw[i] = raw_.at(view.ids[i]);
      touched_.edited[i] = penalties.apply(touched_.raw[i], view.biases[i], view.prompt_counts[i],
                                           view.output_counts[i]);
    }
    __syncthreads();
    if (threadIdx.x == 0) apply_rules_of_text(view, penalties, touched_);
    __syncthreads();
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
      const float y = touched_.edited[i];
      const uint32_t token = view.ids[i];
      left_.value[token] = y == y && allows(token) ? y : minus_infinity();
    }
    __syncthreads();
  }

  // ---- the choice

  __device__ void choose(const SamplerRowView& view) {
    edit(view);
    status_ |= parameters_.status;
    if (parameters_.greedy ||
        static_cast<double>(parameters_.temperature) < rules_.least_temperature) {
      if (!largest_of(left_).any) return finish_empty();
      const uint32_t token = first_token();
      return finish_one(token, left_.at(token));
    }
    if (!run_stages()) return finish_empty();
    draw();
  }

  __device__ Choice finish_nothing(uint8_t status) {
    write_no_kept_logits();
    if (threadIdx.x == 0) {
      params_.index[row_] = -1;
      params_.kept_count[row_] = 0;
      params_.status[row_] = status;
      if (params_.num_logprobs >= 0) {
        params_.rank[row_] = 0;
        params_.logprob[row_] = minus_infinity();
      }
    }
    write_no_top(0);
    return {-1, status};
  }

  // Logits above the chosen one, and those of its ties that come before it.
  __device__ int64_t count_before(float chosen) {
    const int64_t end = rules_.rank_after_ties ? n_ : index_;
    const bool is_number = chosen > minus_infinity();  // NaN counts as -inf here, too
    Number before{0};
    raw_.each([&](float logit, uint32_t token) {
      if (token == index_) return;
      const bool ties = is_number ? logit == chosen : true;
      const bool above = is_number ? logit > chosen : logit > minus_infinity();
      if (above || (ties && token < end)) ++before.value;
    });
    return static_cast<int64_t>(
        cluster_.reduce(before, [](Number a, Number b) { return a + b; }).value);
  }

  __device__ void write_log_probs() {
    const float chosen = raw_.at(index_);
    const int64_t before = count_before(chosen);
    if (threadIdx.x == 0) params_.rank[row_] = 1 + before;
    float logprob = logprob_;
    if (params_.raw_log_probs) {
      logprob = write_raw_top(chosen);
    } else if (drawn_) {
      write_top_of(left_, [](float) { return true; }, rule_, temperature_, mass_);
    } else if (kept_ == 0) {
      write_no_top(0);
    } else if (params_.num_logprobs > 0) {
      if (threadIdx.x == 0) write_top(0, index_, 0.0f);
      write_no_top(1);
    }
    if (threadIdx.x == 0) params_.logprob[row_] = logprob;
  }

  // Of the logits as they came; the chosen one's.
  __device__ float write_raw_top(float chosen) {
    const LargestLogit found = largest_of(raw_);
    if (!found.any) {
      write_no_top(0);
      return minus_infinity();
    }
    const TokenWeight rule{found.max, exponent_factor(1.0f), parameters_.fraction_bits,
                           found.max == plus_infinity()};
    const Word mass = total_of(raw_, rule);
    write_top_of(raw_, [&](float logit) { return counts_in(rule, logit); }, rule, 1.0f, mass);
    return counts_in(rule, chosen)
               ? log_probability(rule.weight(chosen), mass, parameters_.fraction_bits)
               : minus_infinity();
  }

  const TouchedLogits touched_;
  RawRow<T> raw_{};
  const int32_t* bitmask_ = nullptr;
};

}  // namespace lmdecode::sampling::cuda_kernels
