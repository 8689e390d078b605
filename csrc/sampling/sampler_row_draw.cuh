// The draw of a row of a Sampler on a GPU, and the outputs that come of it. See
// sampling/sampler_row_step.cuh.
#pragma once

#include "sampling/drafted_token.h"
#include "sampling/rank_noise.cuh"
#include "sampling/sampler_row_stages.cuh"
#include "sampling/sampler_step.h"
#include "sampling/seed_draw.cuh"

namespace lmdecode::sampling::cuda_kernels {

static_assert(kMostCudaLogProbs <= cuda_tuning::kRankChunk);

class SamplerRowDraw : protected SamplerRowStages {
 protected:
  __device__ SamplerRowDraw(const SamplerStepParams& params, RowStorage& storage, float* row)
      : SamplerRowStages(storage, params.vocab, row), params_(params) {}

  // ---- rows as they come

  struct LargestLogit {
    bool any;  // above -inf
    float max;
  };

  template <class Row>
  __device__ LargestLogit largest_of(const Row& row) {
    const Word key = largest(row, [](float logit, uint32_t) {
      return logit > minus_infinity() ? order_key(logit) : 0u;
    });
    return {key != 0, value_of_key(static_cast<uint32_t>(key))};
  }

  // The mass of a row by a rule of its own.
  template <class Row>
  __device__ Word total_of(const Row& row, const TokenWeight& rule) {
    Number total{0};
    row.each([&](float logit, uint32_t) {
      if (counts_in(rule, logit)) total.value += rule.mass(logit);
    });
    return cluster_.reduce(total, [](Number a, Number b) { return a + b; }).value;
  }

  // Infinite logits are the support; NaN never counts.
  __device__ static bool counts_in(const TokenWeight& rule, float logit) {
    return rule.uniform ? logit == plus_infinity() : logit > minus_infinity();
  }

  // ---- the draw

  // Adaptive-p's.
  __device__ void adapt() {
    const float sum = static_cast<float>(row_weights(total_mass(), 0, rule_.fraction_bits).sum);
    left_.each([to = left_.value, rule = rule_, sum](float logit, uint32_t token) {
      to[token] = rule.weight(logit) / sum;
    });
    left_.target = adapted_target(state_->numbers.adaptive_target, state_->mu);
    left_.adapts = true;
    set_temperature(1.0f);
    find_largest();
  }

  struct Kept {
    Word count, mass, bound;  // bound: of draw_by_seed()
  };

  LMD_OUT_OF_LINE __device__ void draw() {
    if (state_->numbers.adaptive_target >= 0.0) adapt();
    const bool by_seed = parameters_.noise == NoiseMode::kInternal;
    Kept kept{0, 0, 0};
    SeedCandidate mine;
    left_.each([&, rule = rule_, seed = parameters_.seed, position = parameters_.position](
                   float logit, uint32_t token) {
      ++kept.count;
      kept.mass += rule.mass(logit);
      if (by_seed) mine.see(rule.weight(logit), noise_word(seed, position, token, 0), token);
    });
    kept.bound = mine.bound();
    kept = cluster_.reduce(kept, [](const Kept& a, const Kept& b) {
      return Kept{a.count + b.count, a.mass + b.mass, a.bound > b.bound ? a.bound : b.bound};
    });
    uint32_t complement = 0;  // of the token
    if (by_seed && drafted_ != nullptr) complement = choose_by_rejection(kept.mass);
    if (by_seed && complement == 0) {
      complement = draw_by_seed(
          cluster_, left_, [](float, uint32_t) { return true; }, rule_, parameters_.seed,
          parameters_.position, mine, static_cast<uint32_t>(kept.bound));
    }
    const uint32_t token = complement == 0 ? first_token() : 0xffffffffu - complement;
    index_ = token;
    kept_ = static_cast<int64_t>(kept.count);
    weight_ = rule_.weight(left_.at(token));
    if (left_.adapts) probability_ = left_.value[token];
    mass_ = kept.mass;
    logprob_ = log_probability(weight_, mass_, parameters_.fraction_bits);
    drawn_ = true;
    write_kept_logits([&](float logit, uint32_t) { return tempered(logit, temperature_); });
    if (params_.kept_ids != nullptr) write_kept_set();
  }

  // The complement of the token that comes; 0 where the rule leaves none, since p and q are the
  // same.
  __device__ uint32_t choose_by_rejection(uint64_t all) {
    const DraftedToken& drafted = *drafted_;
    struct Best {
      Word accepted;
      ScoredToken scored;
    } best{0, {0, 0}};
    left_.each([&](float logit, uint32_t token) {
      const uint64_t mass = rule_.mass(logit);
      const Wide p = static_cast<Wide>(mass) * drafted.mass;
      const Wide q = static_cast<Wide>(drafted.mass_of(token)) * all;
      if (token == drafted.token && mass > 0 &&
          is_accepted(row_word(parameters_.seed, parameters_.position, kRejectionBlock), q, p)) {
        best.accepted = 0xffffffffu - token;
      }
      if (p <= q) return;
      const double score =
          to_double(p - q) / rejection_noise(parameters_.seed, parameters_.position, token);
      best.scored =
          ScoredToken::better(ScoredToken{bits_of(score), 0xffffffffu - token}, best.scored);
    });
    best = cluster_.reduce(best, [](const Best& a, const Best& b) {
      return Best{a.accepted | b.accepted, ScoredToken::better(a.scored, b.scored)};
    });
    return static_cast<uint32_t>(best.accepted != 0 ? best.accepted : best.scored.token);
  }

  // ---- outputs

  // value(logit, token) of the tokens that are left to kept_logits, -inf of the others.
  template <class ValueOf>
  __device__ void write_kept_logits(ValueOf value) {
    if (params_.kept_logits == nullptr) return;
    float* const out = params_.kept_logits + row_ * n_;
    for (uint32_t token = threadIdx.x; token < left_.vocab; token += blockDim.x) {
      __stcs(out + token, left_.has(token) ? value(left_.at(token), token) : minus_infinity());
    }
  }

  __device__ void write_no_kept_logits() {
    if (params_.kept_logits == nullptr) return;
    float* const out = params_.kept_logits + row_ * n_;
    for (uint32_t token = threadIdx.x; token < left_.vocab; token += blockDim.x) {
      __stcs(out + token, minus_infinity());
    }
  }

  // Ids in ascending order: blockDim.x tokens at a time.
  __device__ void write_kept_set() {
    RowStorage& storage = cluster_.storage();
    int64_t* const ids = params_.kept_ids + row_ * n_;
    float* const logprobs = params_.kept_logprobs + row_ * n_;
    int64_t before = 0;
    for (uint32_t base = 0; base < left_.vocab; base += blockDim.x) {
      const uint32_t token = base + threadIdx.x;
      const bool is_left = token < left_.vocab && left_.has(token);
      const unsigned warp = __ballot_sync(cuda::kFullMask, is_left);
      if (cuda::lane_id() == 0) {
        storage.warp_part[cuda::warp_id()][0] = static_cast<Word>(__popc(warp));
      }
      __syncthreads();
      int64_t at = before + __popc(warp & ((1u << cuda::lane_id()) - 1));
      for (int w = 0; w < static_cast<int>(blockDim.x) / cuda::kWarpSize; ++w) {
        const int64_t part = static_cast<int64_t>(storage.warp_part[w][0]);
        if (w < cuda::warp_id()) at += part;
        before += part;
      }
      if (is_left) {
        ids[at] = token;
        logprobs[at] =
            log_probability(rule_.weight(left_.at(token)), mass_, parameters_.fraction_bits);
      }
      __syncthreads();
    }
  }

  __device__ void finish_empty() {
    status_ |= kStatusEmpty;
    index_ = kept_ = 0;
    logprob_ = minus_infinity();
    write_no_kept_logits();
  }

  // A token that nothing was drawn for.
  __device__ void finish_one(uint32_t token, float value) {
    index_ = token;
    kept_ = 1;
    logprob_ = 0.0f;
    write_no_kept_logits();
    __syncthreads();  // it is written again
    if (threadIdx.x != 0) return;
    if (params_.kept_logits) params_.kept_logits[row_ * n_ + token] = value;
    if (params_.kept_ids) {
      params_.kept_ids[row_ * n_] = token;
      params_.kept_logprobs[row_ * n_] = 0.0f;
    }
  }

  // ---- log-probabilities

  __device__ void write_top(int64_t at, int64_t token, float logprob) {
    params_.top_ids[row_ * params_.num_logprobs + at] = token;
    params_.top_logprobs[row_ * params_.num_logprobs + at] = logprob;
  }

  __device__ void write_no_top(int64_t found) {
    for (int64_t i = found + threadIdx.x; i < params_.num_logprobs; i += blockDim.x) {
      write_top(i, -1, minus_infinity());
    }
  }

  // The best of the tokens of a row for which counts(logit), and what they have of the mass.
  template <class Row, class Counts>
  __device__ void write_top_of(const Row& row, Counts counts, const TokenWeight& rule,
                               float temperature, uint64_t mass) {
    RowStorage& storage = cluster_.storage();
    const Word wanted = static_cast<Word>(params_.num_logprobs);
    if (wanted == 0) return;
    const auto key_of_token = [&](float logit, uint32_t, uint32_t* key) {
      *key = order_key(tempered(logit, temperature));
      return counts(logit);
    };
    const auto no_mass = [](float) { return Word{0}; };
    const Descent cut =
        descend_keys</*kMass=*/false>(cluster_, row, 32, key_of_token, no_mass,
                                      [=](Word all) { return wanted < all ? wanted : Word{0}; });
    uint32_t last = 0xffffffffu;  // of the ties at the cut
    if (cut.reached) {
      const auto place_of = [&](float logit, uint32_t token, uint32_t* key) {
        uint32_t value_key;
        if (!key_of_token(logit, token, &value_key)) return false;
        *key = left_.vocab - 1 - token;
        return value_key == cut.key;
      };
      const Word ties = cut.target - cut.above;
      last = left_.vocab - 1 -
             descend_keys</*kMass=*/false>(cluster_, row, bits_of_number(left_.vocab), place_of,
                                           no_mass, [=](Word) { return ties; })
                 .key;
    }
    __syncthreads();  // the list lies where the histograms are
    if (threadIdx.x == 0) storage.ranked_size = 0;
    __syncthreads();
    row.each([&](float logit, uint32_t token) {
      uint32_t key;
      if (!key_of_token(logit, token, &key)) return;
      if (cut.reached && (key < cut.key || (key == cut.key && token > last))) return;
      storage.ranked[atomicAdd(&storage.ranked_size, 1u)] = static_cast<Word>(~key) << 32 | token;
    });
    __syncthreads();
    const uint32_t found = storage.ranked_size;
    uint32_t padded = 2;
    while (padded < found) padded *= 2;
    for (uint32_t i = found + threadIdx.x; i < padded; i += blockDim.x)
      storage.ranked[i] = ~Word{0};
    bitonic_sort(storage.ranked, padded);
    for (uint32_t i = threadIdx.x; i < found; i += blockDim.x) {
      const uint32_t token = static_cast<uint32_t>(storage.ranked[i]);
      write_top(i, token,
                log_probability(rule.weight(row.at(token)), mass, parameters_.fraction_bits));
    }
    write_no_top(found);
    __syncthreads();
  }

  // ---- the state

  __device__ void accept(SamplerRowView* view) {
    view->accept(index_);
    if (!drawn_) return;
    view->row->mu =
        mu_after_draw(*view->row, weight_, mass_, parameters_.fraction_bits, probability_);
  }

  const SamplerStepParams& params_;
  int64_t row_ = 0;
  const DraftedToken* drafted_ = nullptr;
  uint8_t status_ = 0;
  int64_t index_ = 0, kept_ = 0;
  bool drawn_ = false;  // from what the stages left: what follows is the draw's
  float weight_ = 0.0f;
  uint64_t mass_ = 0;
  float probability_ = 0.0f;  // of the drawn token, before adaptive-p
  float logprob_ = 0.0f;
};

}  // namespace lmdecode::sampling::cuda_kernels
