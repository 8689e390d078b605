// One row of a sampler's step on the CPU, compiled once for each CPU capability. See simd/vec.h.
//
// Where top-k is the first filter, the row is streamed once into a short list, past the tokens that
// penalties and rules touch, which find their places in it afterwards. Where top-k, top-p and min-p
// are all there is, the row is one of top_k_top_p_sample. Else all tokens are listed.
#pragma once

#include "sampling/draft_rejection.h"
#include "sampling/edited_row.h"
#include "sampling/family_stages.h"
#include "sampling/sampler_step.h"
#include "sampling/top_k_top_p_sample_cpu_kernel.h"

namespace lmdecode::LMD_SIMD::sampling {

using namespace lmdecode::sampling;

// Scratch of a thread, beside the list's.
struct SamplerScratch {
  float* row;  // [vocab], and a vector more: the row as it counts
  TouchedLogits touched;
};

template <class T>
class SamplerRowKernel : private FamilyStages {
 public:
  SamplerRowKernel(const SamplerStepParams& params, CandidateList list,
                   const SamplerScratch& scratch)
      : FamilyStages(list),
        params_(params),
        scratch_(scratch),
        n_(params.vocab),
        fraction_bits_(mass_fraction_bits(params.vocab)) {}

  // drafted: to be accepted, or not, by the rule of rejection; null: a token is drawn.
  void run(const T* x, int64_t row, const DraftedToken* drafted = nullptr) {
    x_ = x;
    row_ = row;
    drafted_ = drafted;
    SamplerRowView view(params_.state + row * params_.layout.size, params_.layout);
    status_ = 0;
    drawn_ = false;
    if (params_.stage_counts) {
      counts_ = params_.stage_counts + row * kSamplerStages;
      for (int i = 0; i < kSamplerStages; ++i) counts_[i] = -1;
    }
    if (view.row->active == 0) return finish_nothing();
    state_ = view.row;
    rules_ = sampler_order_rules(static_cast<SamplerOrder>(state_->integers.order));
    if (const int64_t forced = forced_token(view); forced >= 0) {
      finish_one(forced, to_float(x_[forced]));
    } else {
      choose(view);
    }
    params_.status[row_] = status_;
    if (params_.num_logprobs >= 0) write_log_probs();
    if (params_.accept) accept(&view);
  }

 private:
  // ---- outputs

  void write(int64_t index, int64_t kept) {
    params_.index[row_] = index;
    params_.kept_count[row_] = static_cast<int32_t>(kept);
  }

  float* kept_logits() const {
    return params_.kept_logits ? params_.kept_logits + row_ * n_ : nullptr;
  }

  void finish_nothing() {
    write(-1, 0);
    params_.status[row_] = kStatusNoSequence;
    if (params_.kept_logits) fill(kept_logits(), n_, minus_infinity());
    if (params_.num_logprobs < 0) return;
    params_.rank[row_] = 0;
    params_.logprob[row_] = minus_infinity();
    write_top(0);
  }

  void finish_empty() {
    status_ |= kStatusEmpty;
    list_.size = 0;
    write(0, 0);
    logprob_ = minus_infinity();
    if (params_.kept_logits) fill(kept_logits(), n_, minus_infinity());
  }

  // A token that nothing was drawn for.
  void finish_one(int64_t token, float value) {
    write(token, 1);
    logprob_ = 0.0f;
    list_.size = 1;
    list_.value[0] = value;
    list_.token[0] = static_cast<uint32_t>(token);
    if (params_.kept_logits) {
      fill(kept_logits(), n_, minus_infinity());
      kept_logits()[token] = value;
    }
    if (params_.kept_ids) {
      params_.kept_ids[row_ * n_] = token;
      params_.kept_logprobs[row_ * n_] = 0.0f;
    }
  }

  // ---- the choice

  void choose(const SamplerRowView& view) {
    const SamplerNumbers& numbers = state_->numbers;
    const RowEdits edits = edited(view);
    const bool edits_any = edits.count > 0 || edits.allowed != nullptr;
    const RowPlan plan = row_plan();
    status_ |= plan.status;
    const bool greedy =
        plan.greedy || static_cast<double>(plan.temperature) < rules_.least_temperature;
    begin(1.0f, fraction_bits_, /*probabilities=*/false);
    if (greedy) {
      collect_first(1, /*keep_ties=*/false, edits, edits_any);
      if (list_.size == 0) return finish_empty();
      return finish_one(list_.token[0], list_.value[0]);
    }
    plan_ = plan;
    find_stages(numbers);
    const bool wants_list = drafted_ || params_.kept_ids || params_.stage_counts ||
                            (params_.num_logprobs >= 0 && !params_.raw_log_probs);
    if (is_plain_ && !wants_list && (plan.top_k == 0 || !edits_any))
      return sample_plain(edits, edits_any);
    list_row(edits, edits_any);
    run_stages();
    draw();
  }

  RowEdits edited(const SamplerRowView& view) {
    RowEdits edits{view.bits, nullptr, 0, view.ids, scratch_.touched.edited, state_->touched};
    if (params_.bitmask != nullptr) {
      edits.allowed = params_.bitmask + row_ * params_.bitmask_row_stride;
      edits.allowed_words = (n_ + 31) / 32;
    }
    if (edits.count > 0) {
      const SamplerPenalties penalties = sampler_penalties(*state_, rules_);
      edit_touched(x_, view, penalties, scratch_.touched);
      apply_text_rules(view, penalties, scratch_.touched);
    }
    return edits;
  }

  // As of a call of top_k_top_p_sample with this row alone.
  TopKTopPSampleParams plain_params() const {
    const SamplerNumbers& numbers = state_->numbers;
    TopKTopPSampleParams p;
    p.batch = 1;
    p.vocab = n_;
    p.top_k.value = state_->integers.top_k;
    p.top_p.value = static_cast<float>(numbers.top_p);
    p.min_p.value = static_cast<float>(numbers.min_p);
    p.temperature.value = static_cast<float>(numbers.temperature);
    p.has_seed = true;
    p.seed.value = state_->integers.seed;
    p.position.value = state_->position;
    p.dialect = rules_.plain_dialect;
    return p;
  }

  RowPlan row_plan() const { return make_row_plan(plain_params(), rules_.dialect, 0); }

  void sample_plain(const RowEdits& edits, bool edits_any) {
    TopKTopPSampleParams p = plain_params();
    p.index = params_.index + row_;
    p.kept_logits = kept_logits();
    p.kept_count = params_.kept_count + row_;
    uint8_t status = 0;
    p.status = &status;
    if (edits_any) {
      if (edits.write(x_, n_, scratch_.row)) status_ |= kStatusNan;
      RowSampler<float>(p, rules_.dialect, list_).run(scratch_.row, 0);
    } else {
      RowSampler<T>(p, rules_.dialect, list_).run(x_, 0);
    }
    status_ |= status;
  }

  // Which stages are on in this row.
  void find_stages(const SamplerNumbers& numbers) {
    using S = SamplerStage;
    const auto set = [&](S stage, bool on) { on_[static_cast<int>(stage)] = on; };
    const bool dynamic = numbers.dynamic_temperature_range > 0.0;
    set(S::kTemperature, plan_.temperature != 1.0f || dynamic);
    // One that keeps all has a count.
    set(S::kTopK, plan_.top_k > 0 || (params_.stage_counts && state_->integers.top_k > 0));
    set(S::kTopP, plan_.top_p_mode != TopPMode::kOff);
    set(S::kMinP, plan_.min_p_mode != MinPMode::kOff);
    set(S::kTopNSigma, numbers.top_n_sigma > 0.0);
    set(S::kEpsilon, numbers.epsilon_cutoff > 0.0 && numbers.epsilon_cutoff < 1.0);
    set(S::kEta, numbers.eta_cutoff > 0.0 && numbers.eta_cutoff < 1.0);
    set(S::kTopH, numbers.top_h > 0.0);
    set(S::kTypical, numbers.typical_p < 1.0);
    set(S::kXtc, numbers.xtc_probability > 0.0);
    set(S::kMirostat, numbers.mirostat_tau > 0.0);
    is_plain_ = rules_.is_plain && !dynamic;
    for (int i = static_cast<int>(S::kTopNSigma); i < kSamplerStages; ++i) is_plain_ &= !on_[i];
  }

  // ---- the list

  // The first k tokens, in token order.
  void collect_first(int64_t k, bool keep_ties, const RowEdits& edits, bool edits_any) {
    const TopKRule rule{k, temperature_, floor_, keep_ties};
    const bool has_nan = edits_any ? collect_top_k(x_, n_, rule, edits, &list_)
                                   : collect_top_k(x_, n_, rule, NoEdits{}, &list_);
    if (has_nan) status_ |= kStatusNan;
  }

  // Lists what the first stage leaves, or all tokens where it needs them listed.
  void list_row(const RowEdits& edits, bool edits_any) {
    first_stage_ = 0;
    // A temperature keeps the order, so that the stage behind it may be the first. Where what each
    // stage leaves is to be counted, all are listed.
    const bool skips = !params_.stage_counts;
    SamplerStage first = SamplerStage::kTemperature;
    for (int i = 0; skips && i < kSamplerStages; ++i) {
      const SamplerStage stage = rules_.stages[i];
      if (!on_[static_cast<int>(stage)]) continue;
      if (stage == SamplerStage::kTemperature) {
        if (state_->numbers.dynamic_temperature_range > 0.0) break;
        set_temperature(plan_.temperature, plan_.factor);
        first_stage_ = i + 1;
        continue;
      }
      first = stage;
      first_stage_ = i + 1;
      break;
    }
    if (first == SamplerStage::kTopK) {
      return collect_first(plan_.top_k, rules_.dialect.keep_top_k_ties, edits, edits_any);
    }
    if (edits_any) {
      if (edits.write(x_, n_, scratch_.row)) status_ |= kStatusNan;
      list_from(scratch_.row, first);
    } else {
      list_from(x_, first);
    }
  }

  template <class R>
  void list_from(const R* x, SamplerStage first) {
    const RowMax scan = scan_max(x, n_);
    if (scan.has_nan) status_ |= kStatusNan;
    if (!(scan.max >= floor_)) return;
    rule_.max = scan.max;
    max_ = tempered(scan.max, temperature_);
    if (max_ == plus_infinity() || !list_first(x, first)) {
      if (first != SamplerStage::kTemperature) --first_stage_;  // it is still to come
      collect_set(x, n_, kept_from(floor_), &list_);
    }
  }

  // Where the stage is one that keeps all from some value on: lists those.
  template <class R>
  bool list_first(const R* x, SamplerStage stage) {
    const SamplerNumbers& numbers = state_->numbers;
    double offset = 0.0;
    switch (stage) {
      case SamplerStage::kMinP:
        if (plan_.min_p_mode == MinPMode::kOneToken) return false;
        collect_set(x, n_, kept_from(logit_of_key(min_p_key(plan_, max_, false))), &list_);
        return true;
      case SamplerStage::kTopNSigma:
        offset = sigma_offset(numbers.top_n_sigma, x, n_);
        break;
      case SamplerStage::kEpsilon:
        offset = epsilon_offset(numbers.epsilon_cutoff, weigh_row<false>(x, n_));
        break;
      case SamplerStage::kEta:
        offset = eta_offset(numbers.eta_cutoff, weigh_row<true>(x, n_));
        break;
      case SamplerStage::kMirostat:
        offset = mirostat_offset(state_->mu, weigh_row<false>(x, n_));
        break;
      default:
        return false;
    }
    const uint32_t key = key_below_max(offset);
    if (key > order_key(max_)) return false;  // nothing reaches it
    collect_set(x, n_, kept_from(logit_of_key(key)), &list_);
    return true;
  }

  // ---- the stages

  void note(SamplerStage stage) {
    if (params_.stage_counts) counts_[static_cast<int>(stage)] = static_cast<int32_t>(list_.size);
  }

  void run_stages() {
    if (list_.size == 0) return;
    weigh_list();
    for (int i = first_stage_; i < kSamplerStages && list_.size > 0; ++i) {
      const SamplerStage stage = rules_.stages[i];
      if (!on_[static_cast<int>(stage)]) continue;
      run_stage(stage);
      note(stage);
    }
  }

  void run_stage(SamplerStage stage) {
    const SamplerNumbers& numbers = state_->numbers;
    const bool ties = rules_.keep_max_ties;
    switch (stage) {
      case SamplerStage::kTemperature:
        return change_temperature();
      case SamplerStage::kTopK:
        if (plan_.top_k == 0) return;
        cut_top_k({plan_.top_k, temperature_, floor_, rules_.dialect.keep_top_k_ties}, &list_);
        return;
      case SamplerStage::kTopP:
        if (plan_.top_p_mode == TopPMode::kOneToken) {
          return keep_one(rules_.dialect.high_index_first);
        }
        return keep_top_p(plan_.top_p, rules_.dialect.strict_top_p, rules_.dialect.high_index_first,
                          0);
      case SamplerStage::kMinP:
        if (plan_.min_p_mode == MinPMode::kOneToken) return keep_one(/*last=*/false);
        keep_set(&list_, kept_from(logit_of_key(min_p_key(plan_, max_, false))));
        return;
      case SamplerStage::kTopNSigma:
        if (max_ == plus_infinity()) return;
        return keep_below_max(sigma_offset(numbers.top_n_sigma, list_.value, list_.size), ties);
      case SamplerStage::kEpsilon:
        return keep_below_max(epsilon_offset(numbers.epsilon_cutoff, weigh()), ties);
      case SamplerStage::kEta:
        return keep_below_max(eta_offset(numbers.eta_cutoff, weigh()), ties);
      case SamplerStage::kTopH:
        return keep_top_h(numbers.top_h, rules_.top_h_tokens);
      case SamplerStage::kTypical:
        keep_typical(numbers.typical_p, rules_.keep_typical_ties);
        return weigh_list();  // the largest may be gone
      case SamplerStage::kXtc:
        if (excludes_top_choices()) exclude_top_choices(numbers.xtc_threshold);
        return weigh_list();
      case SamplerStage::kMirostat:
        return keep_below_max(mirostat_offset(state_->mu, weigh()), /*keep_ties=*/false);
    }
  }

  void change_temperature() {
    const SamplerNumbers& numbers = state_->numbers;
    float temperature = plan_.temperature;
    if (numbers.dynamic_temperature_range > 0.0) {
      temperature = static_cast<float>(dynamic_temperature(numbers.temperature,
                                                           numbers.dynamic_temperature_range,
                                                           numbers.dynamic_temperature_exponent));
      if (!(temperature > 0.0f)) return keep_one(/*last=*/false);
    }
    set_temperature(temperature, exponent_factor(temperature));
    keep_set(&list_, kept_from(floor_));  // what a division takes to -inf counts no more
    if (list_.size > 0) weigh_list();
  }

  // XTC's chance: a function of seed and position alone, as the noise is.
  bool excludes_top_choices() const {
    const double probability = state_->numbers.xtc_probability;
    if (state_->integers.seed < 0) return probability >= 1.0;
    return row_fraction(state_->integers.seed, state_->position, kXtcBlock) < probability;
  }

  // ---- the draw

  void draw() {
    if (list_.size == 0) return finish_empty();
    pad(&list_);
    int64_t chosen = -1;
    if (plan_.noise != NoiseMode::kInternal) {
      chosen = choose_largest(list_, temperature_);
    } else if (drafted_ != nullptr) {
      make_masses(&list_, rule_);
      chosen = choose_by_rejection(list_, *drafted_, plan_.seed, plan_.position);
    }
    if (chosen < 0) {
      chosen = choose_by_seed(list_, rule_, plan_.seed, plan_.position,
                              reinterpret_cast<float*>(list_.spare_key));
    }
    write(list_.token[chosen], list_.size);
    weight_ = rule_.weight(list_.value[chosen]);
    drawn_ = true;
    if (float* out = kept_logits()) {
      fill(out, n_, minus_infinity());
      for (int64_t i = 0; i < list_.size; ++i) {
        out[list_.token[i]] = tempered(list_.value[i], temperature_);
      }
    }
    const bool needs_mass = params_.kept_ids || on_[static_cast<int>(SamplerStage::kMirostat)] ||
                            (params_.num_logprobs >= 0 && !params_.raw_log_probs);
    if (!needs_mass) return;
    make_masses(&list_, rule_);
    mass_ = total_mass(list_);
    logprob_ = log_probability(weight_, mass_, fraction_bits_);
    if (params_.kept_ids == nullptr) return;
    for (int64_t i = 0; i < list_.size; ++i) {
      params_.kept_ids[row_ * n_ + i] = list_.token[i];
      params_.kept_logprobs[row_ * n_ + i] =
          log_probability(rule_.weight(list_.value[i]), mass_, fraction_bits_);
    }
  }

  // ---- log-probabilities

  void write_top(int64_t found) {
    for (int64_t i = found; i < params_.num_logprobs; ++i) {
      params_.top_ids[row_ * params_.num_logprobs + i] = -1;
      params_.top_logprobs[row_ * params_.num_logprobs + i] = minus_infinity();
    }
  }

  // The best tokens of the list, and what they have of the mass.
  void write_top_of_list(uint64_t mass) {
    const int64_t wanted = params_.num_logprobs;
    make_keys(&list_, temperature_);
    if (wanted < list_.size) select_top_k(&list_, wanted, /*keep_ties=*/false);
    sort_by_key(&list_);
    for (int64_t i = 0; i < list_.size; ++i) {
      params_.top_ids[row_ * wanted + i] = list_.token[i];
      params_.top_logprobs[row_ * wanted + i] =
          log_probability(rule_.weight(list_.value[i]), mass, fraction_bits_);
    }
    write_top(list_.size);
  }

  // Logits above this one, and those before `end` that equal it, it left out.
  int64_t count_before(float chosen, int64_t end) const {
    const int64_t index = params_.index[row_];
    if (!(chosen > minus_infinity())) {  // NaN counts as -inf here, too
      int64_t total = 0;
      for (int64_t i = 0; i < n_; ++i) {
        total += to_float(x_[i]) > minus_infinity() || (i < end && i != index);
      }
      return total;
    }
    const F32 c = splat(chosen);
    int64_t total = 0, i = 0;
    for (; i + kLanes <= n_; i += kLanes) {
      const F32 a = load(x_ + i);
      uint32_t before = bits(a > c);
      if (i + kLanes <= end) before |= bits(a == c);
      total += count(before);
    }
    // What whole vectors leave: the ties of the vector that `end` is in, and the last tokens.
    for (int64_t j = end / kLanes * kLanes; j < end && j < i; ++j)
      total += to_float(x_[j]) == chosen;
    for (; i < n_; ++i) {
      const float a = to_float(x_[i]);
      total += a > chosen || (a == chosen && i < end);
    }
    return total - (index < end ? 1 : 0);
  }

  void write_log_probs() {
    const int64_t index = params_.index[row_];
    const float chosen = to_float(x_[index]);
    params_.rank[row_] = 1 + count_before(chosen, rules_.rank_after_ties ? n_ : index);
    if (!params_.raw_log_probs) {
      params_.logprob[row_] = logprob_;
      if (params_.num_logprobs > 0) {
        if (list_.size == 0) return write_top(0);
        if (!drawn_) {
          params_.top_ids[row_ * params_.num_logprobs] = index;
          params_.top_logprobs[row_ * params_.num_logprobs] = 0.0f;
          return write_top(1);
        }
        write_top_of_list(mass_);
      }
      return;
    }
    begin(1.0f, fraction_bits_, /*probabilities=*/false);
    const RowMax scan = scan_max(x_, n_);
    if (!(scan.max >= floor_)) {
      params_.logprob[row_] = minus_infinity();
      return write_top(0);
    }
    rule_.max = scan.max;
    rule_.uniform = scan.max == plus_infinity();
    uint64_t mass;
    if (rule_.uniform) {
      mass = static_cast<uint64_t>(LMD_SIMD::sampling::count_from(x_, n_, scan.max))
             << fraction_bits_;
    } else {
      mass = scan_masses<false>(x_, n_, rule_.max, rule_.factor, fraction_bits_, plus_infinity(),
                                0.0f, &list_)
                 .total;
      list_.size = 0;
    }
    const bool counts = chosen >= (rule_.uniform ? scan.max : floor_);
    params_.logprob[row_] =
        counts ? log_probability(rule_.weight(chosen), mass, fraction_bits_) : minus_infinity();
    if (params_.num_logprobs == 0) return;
    const float floor = rule_.uniform ? scan.max : floor_;
    collect_top_k(x_, n_, {params_.num_logprobs, 1.0f, floor, false}, NoEdits{}, &list_);
    write_top_of_list(mass);
  }

  // ---- the state

  void accept(SamplerRowView* view) {
    view->accept(params_.index[row_]);
    if (drawn_ && state_->numbers.mirostat_tau > 0.0) {
      const double kept =
          static_cast<double>(mass_) / static_cast<double>(uint64_t{1} << fraction_bits_);
      const double log = log_f64(static_cast<double>(weight_)) - log_f64(kept);
      const double surprise = -log * kLog2E;
      state_->mu = static_cast<double>(static_cast<float>(
          state_->mu - state_->numbers.mirostat_eta * (surprise - state_->numbers.mirostat_tau)));
    }
  }

  const SamplerStepParams& params_;
  const SamplerScratch& scratch_;
  const int64_t n_;
  const int fraction_bits_;
  const T* x_ = nullptr;
  int64_t row_ = 0;
  const DraftedToken* drafted_ = nullptr;
  SamplerRow* state_ = nullptr;
  SamplerOrderRules rules_{};
  RowPlan plan_;
  bool on_[kSamplerStages] = {};
  bool is_plain_ = false;
  int first_stage_ = 0;
  int32_t* counts_ = nullptr;
  uint8_t status_ = 0;
  bool drawn_ = false;  // from the list: what follows is the draw's
  float weight_ = 0.0f;
  uint64_t mass_ = 0;
  float logprob_ = 0.0f;
};

}  // namespace lmdecode::LMD_SIMD::sampling
