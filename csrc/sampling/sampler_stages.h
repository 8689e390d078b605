// The stages of a row of a Sampler: which are on, and what each leaves of the row. A kernel header:
// see simd/vec.h.
#pragma once

#include "sampling/list_stages.h"
#include "sampling/probability_filters.h"
#include "sampling/sampler_edits.h"
#include "sampling/sampler_row_parameters.h"

// ---- a row of logits with edited values for some tokens

namespace lmdecode::LMD_SIMD::sampling {

using namespace lmdecode::sampling;

// The touched tokens' logits, and the tokens that a bitmask allows: see NoEdits in row_passes.h.
struct RowEdits {
  static constexpr bool kAny = true;

  const uint64_t* touched_bits;
  const int32_t* allowed;  // [allowed_words], or null
  int64_t allowed_words;
  const uint32_t* ids;  // [count] touched tokens, in any order
  const float* edited;  // [count] their logits
  int64_t count;

  bool any() const { return count > 0 || allowed != nullptr; }

  bool allows(int64_t token) const {
    return allowed == nullptr ||
           (static_cast<uint32_t>(allowed[token / 32]) >> (token % 32) & 1) != 0;
  }

  uint64_t allowed_word(int64_t block) const {
    if (allowed == nullptr) return ~uint64_t{0};
    const int64_t i = 2 * block;
    const uint64_t low = static_cast<uint32_t>(allowed[i]);
    const uint64_t high = i + 1 < allowed_words ? static_cast<uint32_t>(allowed[i + 1]) : 0;
    return high << 32 | low;
  }

  uint64_t word(int64_t block) const {
    return count == 0 ? allowed_word(block) : allowed_word(block) & ~touched_bits[block];
  }

  // The list stays in ascending token order.
  void append(float threshold, CandidateList* list) const {
    const int64_t before = list->size;
    const F32 bound = splat(threshold);
    for (int64_t i = 0; i < count; i += kLanes) {
      const F32 y = load(edited + i);
      uint32_t mask = bits(y >= bound);
      if (count - i < kLanes) mask &= (1u << (count - i)) - 1;
      push(list, mask, y, load(ids + i));
    }
    // Token and value of the new ones, as numbers that sort by token.
    uint64_t* added = list->spare_mass;
    int64_t n = 0;
    for (int64_t i = before; i < list->size; ++i) {
      if (!allows(list->token[i])) continue;
      added[n++] = static_cast<uint64_t>(list->token[i]) << 32 | bits_of(list->value[i]);
    }
    sort(added, n);
    list->size = before + n;
    int64_t old = before - 1;
    for (int64_t to = list->size - 1; n > 0; --to) {
      const uint32_t token = static_cast<uint32_t>(added[n - 1] >> 32);
      if (old >= 0 && list->token[old] > token) {
        list->token[to] = list->token[old];
        list->value[to] = list->value[old];
        --old;
      } else {
        --n;
        list->token[to] = token;
        list->value[to] = float_of(static_cast<uint32_t>(added[n]));
      }
    }
  }

  // Writes the whole edited row to `out`, without NaN. Returns whether x had one.
  template <class T>
  bool write(const T* x, int64_t n, float* out) const {
    const F32 zero = splat(0.0f), off = splat(minus_infinity());
    uint32_t nan = 0;
    for (int64_t i = 0; i < n; i += kBlock) {
      const uint64_t word = allowed_word(i / kBlock);
      for (int64_t j = i; j < i + kBlock && j < n; j += kLanes) {
        const F32 a = j + kLanes <= n ? load(x + j)
                                      : load_part(x + j, static_cast<int>(n - j), minus_infinity());
        const Mask is_number = a == a;
        nan |= bits(is_nan(a, zero));
        store(out + j, select(is_number, a, off));  // `out` has room for whole vectors
        uint32_t banned = ~static_cast<uint32_t>(word >> (j - i)) & kAllLanes;
        for (; banned != 0; banned &= banned - 1) out[j + __builtin_ctz(banned)] = minus_infinity();
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      const float y = edited[i];
      out[ids[i]] = y == y && allows(ids[i]) ? y : minus_infinity();
    }
    return nan != 0;
  }

 private:
  // Shell's sort: a few hundred numbers, often in order already.
  static void sort(uint64_t* number, int64_t n) {
    constexpr int64_t kGaps[] = {4193, 1073, 281, 77, 23, 8, 1};
    for (const int64_t gap : kGaps) {
      for (int64_t i = gap; i < n; ++i) {
        const uint64_t a = number[i];
        int64_t j = i;
        for (; j >= gap && number[j - gap] > a; j -= gap) number[j] = number[j - gap];
        number[j] = a;
      }
    }
  }
};

// The logits of the touched tokens of a row: from the model, then after penalties. Text rules
// follow: apply_text_rules().
template <class T>
void edit_touched(const T* x, const SamplerRowView& view, const SamplerPenalties& penalties,
                  const TouchedLogits& logits) {
  const int64_t count = view.row->touched;
  for (int64_t i = 0; i < count; ++i) logits.raw[i] = to_float(x[view.ids[i]]);
  const F32 repetition = splat(penalties.repetition), presence = splat(penalties.presence),
            frequency = splat(penalties.frequency), zero = splat(0.0f),
            off = splat(minus_infinity());
  const U32 one = splat_u32(1);
  // Lanes after the last token hold garbage: the arrays have room for them.
  for (int64_t i = 0; i < count; i += kLanes) {
    const F32 bias = load(view.biases + i);
    const U32 prompt = load(view.prompt_counts + i), output = load(view.output_counts + i);
    F32 y = select(bias == off, off, load(logits.raw + i) + bias);
    if (penalties.repetition != 1.0f) {
      const F32 repeated = select(zero > y, y * repetition, y / repetition);
      y = select(prompt + output >= one, repeated, y);
    }
    const U32 counted = penalties.counts_see_prompt ? prompt + output : output;
    y = select(counted >= one, (y - frequency * convert_u32(counted)) - presence, y);
    store(logits.edited + i, y);
  }
}

class SamplerStages : public ProbabilityFilters {
 protected:
  // row: scratch for the vocabulary's size, and a vector more.
  SamplerStages(CandidateList list, int64_t vocab, float* row)
      : ProbabilityFilters(list), n_(vocab), scratch_row_(row) {}

  // A row begins. counts: [kSamplerStages] what each stage leaves, or null.
  void begin_stages(const SamplerRow* state, int32_t* counts) {
    state_ = state;
    rules_ = sampler_dialect_rules(static_cast<SamplerDialect>(state->integers.dialect));
    counts_ = counts;
    status_ = 0;
  }

  // Which stages are on in this row.
  void find_stages(const SamplerNumbers& numbers) {
    stages_of_row(*state_, parameters_, counts_ != nullptr, on_);
    bool& xtc = on_[static_cast<int>(SamplerStage::kXtc)];
    if (xtc && !counts_) xtc = excludes_top_choices(*state_);
    const bool dynamic = numbers.dynamic_temperature_range > 0.0;
    is_plain_ = rules_.is_plain && !dynamic && !(numbers.adaptive_target >= 0.0);
    for (int i = static_cast<int>(SamplerStage::kTopNSigma); i < kSamplerStages; ++i)
      is_plain_ &= !on_[i];
  }

  // ---- the list

  // The first k tokens, in token order.
  template <class T>
  void collect_first(const T* x, int64_t k, bool keep_ties, const RowEdits& edits) {
    const TopKRule rule{k, temperature_, floor_, keep_ties};
    const bool has_nan = edits.any() ? collect_top_k(x, n_, rule, edits, &list_)
                                     : collect_top_k(x, n_, rule, NoEdits{}, &list_);
    if (has_nan) status_ |= kStatusNan;
  }

  // Lists what the first stage leaves, or all tokens where it needs them listed.
  template <class T>
  void list_row(const T* x, const RowEdits& edits) {
    first_stage_ = 0;
    // A temperature keeps the order, so that the stage after it may be the first. If the count
    // after each stage is an output, all tokens are listed.
    const bool skips = !counts_;
    SamplerStage first = SamplerStage::kTemperature;
    for (int i = 0; skips && i < kSamplerStages; ++i) {
      const SamplerStage stage = rules_.stages[i];
      if (!on_[static_cast<int>(stage)]) continue;
      if (stage == SamplerStage::kTemperature) {
        if (state_->numbers.dynamic_temperature_range > 0.0) break;
        set_temperature(parameters_.temperature, parameters_.factor);
        first_stage_ = i + 1;
        continue;
      }
      first = stage;
      first_stage_ = i + 1;
      break;
    }
    if (first == SamplerStage::kTopH && rules_.top_h_tokens > 0) {
      --first_stage_;  // it is still to come
      return collect_first(x, rules_.top_h_tokens, /*keep_ties=*/false, edits);
    }
    if (first == SamplerStage::kTopK) {
      return collect_first(x, parameters_.top_k, rules_.dialect.keep_top_k_ties, edits);
    }
    if (edits.any()) {
      if (edits.write(x, n_, scratch_row_)) status_ |= kStatusNan;
      list_from(scratch_row_, first);
    } else {
      list_from(x, first);
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

  // If the stage keeps everything from some value on, lists that.
  template <class R>
  bool list_first(const R* x, SamplerStage stage) {
    const SamplerNumbers& numbers = state_->numbers;
    double offset = 0.0;
    switch (stage) {
      case SamplerStage::kMinP:
        if (parameters_.min_p_mode == MinPMode::kOneToken) return false;
        collect_set(x, n_, kept_from(logit_of_key(min_p_key(parameters_, max_, false))), &list_);
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
      case SamplerStage::kTopH:
        return list_top_h(numbers.top_h, x, n_);
      case SamplerStage::kTypical:
        return list_typical(numbers.typical_p, rules_.keep_typical_ties, x, n_);
      default:
        return false;
    }
    const uint32_t key = key_below_max(max_, offset);
    if (key > order_key(max_)) return false;  // nothing reaches it
    collect_set(x, n_, kept_from(logit_of_key(key)), &list_);
    return true;
  }

  // ---- the stages

  void note(SamplerStage stage) {
    if (counts_) counts_[static_cast<int>(stage)] = static_cast<int32_t>(list_.size);
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
        if (parameters_.top_k == 0) return;
        cut_top_k({parameters_.top_k, temperature_, floor_, rules_.dialect.keep_top_k_ties},
                  &list_);
        return;
      case SamplerStage::kTopP:
        if (parameters_.top_p_mode == TopPMode::kOneToken) {
          return keep_one(rules_.dialect.high_index_first);
        }
        return keep_top_p(parameters_.top_p, rules_.dialect.strict_top_p,
                          rules_.dialect.high_index_first, 0);
      case SamplerStage::kMinP:
        if (parameters_.min_p_mode == MinPMode::kOneToken) return keep_one(/*last=*/false);
        keep_set(&list_, kept_from(logit_of_key(min_p_key(parameters_, max_, false))));
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
        if (excludes_top_choices(*state_)) exclude_top_choices(numbers.xtc_threshold);
        return weigh_list();
      case SamplerStage::kMirostat:
        return keep_below_max(mirostat_offset(state_->mu, weigh()), /*keep_ties=*/false);
    }
  }

  void change_temperature() {
    const SamplerNumbers& numbers = state_->numbers;
    float temperature = parameters_.temperature;
    if (numbers.dynamic_temperature_range > 0.0) {
      if (list_.size > 1) {
        temperature =
            static_cast<float>(dynamic_temperature(numbers, list_.size, weigh().entropy()));
      }
      if (!(temperature > 0.0f)) return keep_one(/*last=*/false);
    }
    set_temperature(temperature, exponent_factor(temperature));
    keep_set(&list_, kept_from(floor_));  // what a division takes to -inf counts no more
    if (list_.size > 0) weigh_list();
  }

  const int64_t n_;
  float* const scratch_row_;
  const SamplerRow* state_ = nullptr;
  SamplerDialectRules rules_{};
  RowParameters parameters_;
  bool on_[kSamplerStages] = {};
  bool is_plain_ = false;  // top_k_top_p_sample has all that is on
  int first_stage_ = 0;    // the first stage not yet applied to the list
  int32_t* counts_ = nullptr;
  uint8_t status_ = 0;
};

}  // namespace lmdecode::LMD_SIMD::sampling
