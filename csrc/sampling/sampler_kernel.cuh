// The kernels of a Sampler: a block of threads takes a row, or a sequence and its drafts, at a
// time.
#pragma once

#include "sampling/drafted_token.h"
#include "sampling/rank_noise.cuh"
#include "sampling/sampler_row_stages.cuh"
#include "sampling/sampler_step.h"
#include "sampling/sampler_text_rules.h"
#include "sampling/sampler_verify.h"
#include "sampling/sampler_workspace.h"
#include "sampling/seed_draw.cuh"

// ---- the draw of a row, and its outputs

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

  // Writes the best tokens of a row for which counts(logit), and their log-probabilities.
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
  bool drawn_ = false;  // the token was drawn from what the stages left
  float weight_ = 0.0f;
  uint64_t mass_ = 0;
  float probability_ = 0.0f;  // of the drawn token, before adaptive-p
  float logprob_ = 0.0f;
};

// A row of a Sampler on a GPU: the counterpart of sampling/sampler_cpu_kernel.h, with the same
// results bit for bit. A block of threads works on a row; its first thread runs the text rules and
// updates the state, with the same functions as the CPU.

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
    const SamplerDialectRules rules =
        sampler_dialect_rules(static_cast<SamplerDialect>(view.row->integers.dialect));
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

  // The input of the rejection rule from a draft's logits. A draft without logits, or with all of
  // them -inf or NaN, is certain.
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

  // Number of logits above the chosen one, plus its ties that rank before it.
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

  // Writes the top log-probabilities of the unedited logits. Returns the chosen token's.
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

__device__ inline SamplerBlockWorkspace block_workspace(const SamplerStepParams& params,
                                                        char* scratch) {
  SamplerBlockWorkspace workspace;
  const size_t bytes = workspace.split(nullptr, params.layout);
  workspace.split(scratch + blockIdx.x * bytes, params.layout);
  return workspace;
}

template <class T>
__global__ void __launch_bounds__(cuda_tuning::kMaxThreads, 1)
    sampler_step_kernel(const LMD_KERNEL_PARAM SamplerStepParams params, char* scratch) {
  CudaSamplerStep<T> kernel(params, cuda::shared_storage<RowStorage>(),
                            block_workspace(params, scratch));
  const T* logits = static_cast<const T*>(params.logits);
  for (int64_t row = blockIdx.x; row < params.batch; row += gridDim.x) {
    const int32_t* bitmask =
        params.bitmask ? params.bitmask + row * params.bitmask_row_stride : nullptr;
    kernel.run(logits + row * params.logits_row_stride, row, bitmask, nullptr, 1);
  }
}

// One sequence: from the text, then from each accepted draft. All threads see the same numbers and
// go the same way; the first writes.
template <class T>
__device__ void verify_row(const SamplerVerifyParams& v, int64_t row, CudaSamplerStep<T>* kernel) {
  const SamplerStepParams& step = v.step;
  const int64_t drafts = v.num_draft ? v.num_draft[row] : v.drafts;
  const int64_t* draft = v.draft + row * v.drafts;
  int64_t* tokens = v.tokens + row * (v.drafts + 1);
  int64_t* path = v.path + row * v.drafts;
  const T* logits = static_cast<const T*>(step.logits) + row * step.logits_row_stride;
  const int32_t* bitmask = step.bitmask ? step.bitmask + row * step.bitmask_row_stride : nullptr;
  uint8_t status = 0;
  int64_t accepted = 0, node = -1;
  for (;;) {
    if (drafts < 0 || drafts > v.drafts) {
      status = kernel->refuse(row).status;
      if (threadIdx.x == 0) tokens[0] = -1;
      break;
    }
    // The first child of this draft; in a chain, the next draft.
    const auto next_child = [&](int64_t after) {
      if (v.parents == nullptr) return after == node + 1 && after < drafts ? after : drafts;
      while (after < drafts && v.parents[row * v.drafts + after] != node) ++after;
      return after;
    };
    int64_t child = next_child(node + 1);
    DraftedToken drafted{};
    const bool rejects = v.rejection && child < drafts;
    if (rejects) {
      drafted = kernel->drafted_token(
          draft[child],
          v.draft_logits ? v.draft_logits + (row * v.drafts + child) * step.vocab : nullptr);
    }
    const auto choice =
        kernel->run(logits + (node + 1) * v.logits_draft_stride, row,
                    bitmask ? bitmask + (node + 1) * v.bitmask_draft_stride : nullptr,
                    // A row that is refused is so at once: there is room for as much as may come.
                    rejects ? &drafted : nullptr, v.drafts + 1 - accepted);
    status |= choice.status;
    if (threadIdx.x == 0) tokens[accepted] = choice.token;
    while (child < drafts && draft[child] != choice.token) child = next_child(child + 1);
    // A row of nothing stands for no draw: no draft is accepted there.
    if (child >= drafts || choice.token < 0 || (choice.status & kStatusEmpty)) break;
    if (threadIdx.x == 0) path[accepted] = child;
    node = child;
    ++accepted;
  }
  if (threadIdx.x != 0) return;
  step.status[row] = status;
  v.num_accepted[row] = accepted;
  for (int64_t i = accepted + 1; i <= v.drafts; ++i) tokens[i] = -1;
  for (int64_t i = accepted; i < v.drafts; ++i) path[i] = -1;
}

template <class T>
__global__ void __launch_bounds__(cuda_tuning::kMaxThreads, 1)
    sampler_verify_kernel(const LMD_KERNEL_PARAM SamplerVerifyParams params, char* scratch) {
  CudaSamplerStep<T> kernel(params.step, cuda::shared_storage<RowStorage>(),
                            block_workspace(params.step, scratch));
  for (int64_t row = blockIdx.x; row < params.step.batch; row += gridDim.x) {
    verify_row(params, row, &kernel);
  }
}

}  // namespace lmdecode::sampling::cuda_kernels
