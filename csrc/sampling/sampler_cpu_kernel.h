// One row of a sampler's step on the CPU, compiled once for each CPU capability. See simd/vec.h.
//
// Where top-k is the first filter, the row is streamed once into a short list, without the tokens
// that penalties and rules touch, which are inserted afterwards. If top-k, top-p and min-p are the
// only stages, the row runs as in top_k_top_p_sample. Else all tokens are listed.
#pragma once

#include "sampling/adaptive_p.h"
#include "sampling/drafted_token.h"
#include "sampling/row_passes.h"
#include "sampling/sampler_stages.h"
#include "sampling/sampler_step.h"
#include "sampling/token_choice.h"
#include "sampling/top_k_top_p_sample_cpu_kernel.h"

// The rule of rejection for one drafted token (arXiv 2211.17192, 2302.01318): accepted with the
// probability min(1, p / q), else a token of the distribution of (p - q)+ is drawn, so that what
// comes out is distributed as p. Exact, in integers: masses against masses. A kernel header: see
// simd/vec.h.

namespace lmdecode::LMD_SIMD::sampling {

using namespace lmdecode::sampling;

// A draft without logits, or with all of them -inf or NaN, is certain. The list is scratch.
inline DraftedToken drafted_token(int64_t token, const float* logits, int64_t n, int fraction_bits,
                                  CandidateList* list) {
  DraftedToken d{token, nullptr, {}, 1};
  if (logits == nullptr) return d;
  const RowMax scan = scan_max(logits, n);
  if (!(scan.max > minus_infinity())) return d;
  d.logits = logits;
  d.rule.max = scan.max;
  d.rule.factor = exponent_factor(1.0f);
  d.rule.fraction_bits = fraction_bits;
  d.rule.uniform = scan.max == plus_infinity();
  if (d.rule.uniform) {
    d.mass = static_cast<uint64_t>(count_from(logits, n, scan.max)) << fraction_bits;
    return d;
  }
  list->size = 0;
  d.mass = scan_masses<false>(logits, n, d.rule.max, d.rule.factor, fraction_bits, plus_infinity(),
                              0.0f, list)
               .total;
  return d;
}

// The place in the list, which has masses, of the token that comes next; -1 where the rule leaves
// none, since p and q are the same.
inline int64_t choose_by_rejection(const CandidateList& list, const DraftedToken& drafted,
                                   int64_t seed, int64_t position) {
  const uint64_t all = total_mass(list);
  const auto p = [&](int64_t i) { return static_cast<Wide>(list.mass[i]) * drafted.mass; };
  const auto q = [&](int64_t i) { return static_cast<Wide>(drafted.mass_of(list.token[i])) * all; };
  int64_t best = -1;
  double best_score = 0.0;
  for (int64_t i = 0; i < list.size; ++i) {
    if (list.token[i] == drafted.token && list.mass[i] > 0 &&
        is_accepted(row_word(seed, position, kRejectionBlock), q(i), p(i))) {
      return i;
    }
    if (p(i) <= q(i)) continue;
    const double noise = rejection_noise(seed, position, list.token[i]);
    const double score = to_double(p(i) - q(i)) / noise;
    if (best < 0 || score > best_score) {
      best = i;
      best_score = score;
    }
  }
  return best;
}

// Scratch of a thread, beside the list's.
struct SamplerScratch {
  float* row;  // [vocab], and a vector more: the row as it counts
  TouchedLogits touched;
};

template <class T>
class CpuSamplerStep : private SamplerStages {
 public:
  CpuSamplerStep(const SamplerStepParams& params, CandidateList list, const SamplerScratch& scratch)
      : SamplerStages(list, params.vocab, scratch.row),
        params_(params),
        scratch_(scratch),
        fraction_bits_(mass_fraction_bits(params.vocab)) {}

  // drafted: to be accepted, or not, by the rule of rejection; null: a token is drawn.
  void run(const T* x, int64_t row, const DraftedToken* drafted = nullptr) {
    x_ = x;
    row_ = row;
    drafted_ = drafted;
    SamplerRowView view(params_.state + row * params_.layout.size, params_.layout);
    drawn_ = false;
    int32_t* const counts =
        params_.stage_counts ? params_.stage_counts + row * kSamplerStages : nullptr;
    for (int i = 0; counts && i < kSamplerStages; ++i) counts[i] = -1;
    if (view.row->active == 0) return finish_nothing();
    begin_stages(view.row, counts);
    if (const int64_t forced = forced_token(view); forced >= 0) {
      finish_one(forced, to_float(x_[forced]));
    } else {
      choose(view);
    }
    params_.status[row_] = status_;
    if (params_.num_logprobs >= 0) write_log_probs();
    if (params_.accept) accept(&view, view.row);
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
    const RowEdits edits = edited(view);
    parameters_ = parameters_of_row(plain_params(*state_, rules_, n_), rules_.dialect, 0);
    status_ |= parameters_.status;
    begin(1.0f, fraction_bits_, /*probabilities=*/false);
    if (parameters_.greedy ||
        static_cast<double>(parameters_.temperature) < rules_.least_temperature) {
      collect_first(x_, 1, /*keep_ties=*/false, edits);
      if (list_.size == 0) return finish_empty();
      return finish_one(list_.token[0], list_.value[0]);
    }
    find_stages(state_->numbers);
    const bool wants_list = drafted_ || params_.kept_ids || params_.stage_counts ||
                            (params_.num_logprobs >= 0 && !params_.raw_log_probs);
    if (is_plain_ && !wants_list && (parameters_.top_k == 0 || !edits.any()))
      return sample_plain(edits);
    list_row(x_, edits);
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

  void sample_plain(const RowEdits& edits) {
    TopKTopPSampleParams p = plain_params(*state_, rules_, n_);
    p.index = params_.index + row_;
    p.kept_logits = kept_logits();
    p.kept_count = params_.kept_count + row_;
    uint8_t status = 0;
    p.status = &status;
    if (edits.any()) {
      if (edits.write(x_, n_, scratch_row_)) status_ |= kStatusNan;
      CpuRowSampler<float>(p, rules_.dialect, list_).run(scratch_row_, 0);
    } else {
      CpuRowSampler<T>(p, rules_.dialect, list_).run(x_, 0);
    }
    status_ |= status;
  }

  // ---- the draw

  // Replaces the logits by adaptive-p's. The list keeps its tokens, and probabilities() theirs.
  void adapt() {
    make_masses(&list_, rule_);
    float* const p = probabilities();
    const float sum = static_cast<float>(weights_of(total_mass(list_), 0).sum);
    for (int64_t i = 0; i < list_.size; i += kLanes) {
      store(p + i, weights(rule_, load(list_.value + i)) / splat(sum));
    }
    const float target = adapted_target(state_->numbers.adaptive_target, state_->mu);
    for (int64_t i = 0; i < list_.size; ++i) list_.value[i] = adapted_logit(p[i], target);
    set_temperature(1.0f, exponent_factor(1.0f));
    weigh_list();
  }

  // [list_.size, padded] before adapt()
  float* probabilities() { return reinterpret_cast<float*>(list_.spare_mass); }

  float probability_of(int64_t token) {
    int64_t i = 0;
    while (list_.token[i] != token) ++i;
    return probabilities()[i];
  }

  struct Drawn {
    int64_t token;
    float value;
  };

  Drawn drawn_token() {
    const auto listed = [&](int64_t i) { return Drawn{list_.token[i], list_.value[i]}; };
    if (parameters_.noise != NoiseMode::kInternal)
      return listed(choose_largest(list_, temperature_));
    if (drafted_ != nullptr) {
      make_masses(&list_, rule_);
      const int64_t i =
          choose_by_rejection(list_, *drafted_, parameters_.seed, parameters_.position);
      if (i >= 0) return listed(i);
    }
    float* const upper = reinterpret_cast<float*>(list_.spare_key);
    if (list_.size <= n_ / tuning::kDenseNoiseShare) {
      return listed(choose_by_seed(list_, rule_, parameters_.seed, parameters_.position, upper));
    }
    // Neighbours share their noise's computation: in a row, not in a list.
    float* const row = scratch_row_;
    fill(row, n_, minus_infinity());
    for (int64_t i = 0; i < list_.size; ++i) row[list_.token[i]] = list_.value[i];
    const RowChoice choice = choose_by_seed(row, n_, kept_from(floor_), rule_, parameters_.seed,
                                            parameters_.position, upper);
    return {choice.token, row[choice.token]};
  }

  void draw() {
    if (list_.size == 0) return finish_empty();
    pad(&list_);
    adapts_ = state_->numbers.adaptive_target >= 0.0;
    if (adapts_) adapt();
    const Drawn drawn = drawn_token();
    write(drawn.token, list_.size);
    if (adapts_) probability_ = probability_of(drawn.token);
    weight_ = rule_.weight(drawn.value);
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

  // Writes the best tokens of the list and their log-probabilities.
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

  // Number of logits above this one, plus the equal ones before `end`, itself left out.
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
    // The remainder of whole vectors: ties in the vector of `end`, and the last tokens.
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

  void accept(SamplerRowView* view, SamplerRow* state) {
    view->accept(params_.index[row_]);
    if (drawn_) state->mu = mu_after_draw(*state_, weight_, mass_, fraction_bits_, probability_);
  }

  const SamplerStepParams& params_;
  const SamplerScratch& scratch_;
  const int fraction_bits_;
  const T* x_ = nullptr;
  int64_t row_ = 0;
  const DraftedToken* drafted_ = nullptr;
  bool drawn_ = false;  // the token was drawn from the list
  float weight_ = 0.0f;
  uint64_t mass_ = 0;
  bool adapts_ = false;       // adaptive-p is on
  float probability_ = 0.0f;  // of the drawn token, before that
  float logprob_ = 0.0f;
};

}  // namespace lmdecode::LMD_SIMD::sampling
