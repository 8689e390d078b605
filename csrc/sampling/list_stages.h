// Stages on a list of candidates, shared by top_k_top_p_sample and the sampler. Each keeps a part
// of the list. A kernel header: see simd/vec.h.
#pragma once

#include "sampling/kept_set.h"
#include "sampling/row_parameters.h"
#include "sampling/row_passes.h"
#include "sampling/token_choice.h"

// ---- the cut of top-p: the guess, and the kept part

namespace lmdecode::sampling {

// Logits between which the cut is looked for: the list holds the tokens from `lower` on, and below
// `upper` where bounded.
struct Band {
  float lower, upper;
  bool bounded;
};

// A prefix of the list of candidates.
struct ListCut {
  KeptSet set;
  int64_t kept;
  uint64_t mass;
};

// The part of the row that top-p keeps.
struct RowCut {
  KeptSet set;
  int64_t kept;   // tokens, -1 where not counted
  uint64_t mass;  // of the kept tokens, 0 where not summed
  bool listed;    // the list holds all kept tokens
};

}  // namespace lmdecode::sampling

// The first k tokens of a row, in one pass over it: candidates above a threshold that is guessed
// from a sample of the row and verified exactly afterwards. A wrong guess costs another pass and
// changes nothing else. A kernel header: see simd/vec.h.

namespace lmdecode::LMD_SIMD::sampling {

using namespace lmdecode::sampling;

inline float larger(float a, float b) { return a > b ? a : b; }
inline float smaller(float a, float b) { return a < b ? a : b; }

// About the rank-th largest element of the sample, never above it by more than the search's
// resolution; -inf where there are fewer numbers than that.
inline float sample_quantile(const float* sample, int size, int rank) {
  using namespace tuning;
  F32 top = splat(minus_infinity());
  for (int i = 0; i < size; i += kLanes) top = max(load(sample + i), top);
  const uint32_t high_key = order_key(reduce_max(top));
  // count(>= low) >= rank (or low is -inf), count(>= high) < rank unless high is the maximum
  uint64_t low = kMinusInfinityKey, high = static_cast<uint64_t>(high_key) + 1;
  for (int step = 0; step < 32 && high - low > 1; ++step) {
    // Halves of the key range first cut exponents: 12 steps leave a relative resolution of a few
    // percent.
    if (step >= kSampleSteps && low != kMinusInfinityKey) break;
    const uint64_t middle = (low + high) / 2;
    const F32 b = splat(value_of_key(static_cast<uint32_t>(middle)));
    int n = 0;
    for (int i = 0; i < size; i += kLanes) n += count(bits(load(sample + i) >= b));
    (n >= rank ? low : high) = middle;
  }
  return value_of_key(static_cast<uint32_t>(low));
}

// Selects the first k tokens by logit / temperature among logits >= floor; with keep_ties also all
// that tie with the k-th.
struct TopKRule {
  int64_t k;  // 1 <= k
  float temperature;
  float floor;
  bool keep_ties;
};

inline uint32_t cut_top_k(const TopKRule& rule, CandidateList* list) {
  make_keys(list, rule.temperature);
  return rule.k < list->size ? select_top_k(list, rule.k, rule.keep_ties) : 0;
}

// Appends the candidates >= threshold, cutting the list back to k whenever it grows long. Reports
// NaN.
template <class T, class Edits>
bool stream_top_k(const T* x, int64_t n, const TopKRule& rule, const Edits& edits, float threshold,
                  CandidateList* list) {
  int64_t limit = tuning::kShrinkFactor * rule.k + tuning::kShrinkSlack;
  const float lowest = threshold;
  const bool has_nan = collect(x, n, &threshold, &limit, list, edits, [&](CandidateList* full) {
    const uint32_t key = cut_top_k(rule, full);
    // A later token with the key of the k-th has lost its place already, unless ties are kept.
    const float raised = key == kPlusInfinityKey && !rule.keep_ties
                             ? plus_infinity()
                             : lowest_logit(rule.keep_ties ? key : key + 1, rule.temperature);
    if (raised > threshold) threshold = raised;
    if (full->size > limit / 2) limit = 2 * full->size;
  });
  edits.append(lowest, list);
  return has_nan;
}

// The list is empty before, and holds those tokens, with keys, after. Reports NaN.
template <class T, class Edits>
bool collect_top_k(const T* x, int64_t n, const TopKRule& rule, const Edits& edits,
                   CandidateList* list) {
  using namespace tuning;
  const int64_t k = rule.k;
  bool has_nan = false;
  // Thresholds to try: by the expected rank in a sample, by a generous one, and one that is safe.
  float threshold[3] = {rule.floor, rule.floor, rule.floor};
  if (n >= kMinSampledVocab && k <= n / 4) {
    alignas(64) float sample[kSampleSize];
    sample_row(x, n, kSampleSize, edits, sample);
    const auto quantile = [&](int rank) {
      return class_bottom(larger(sample_quantile(sample, kSampleSize, rank), rule.floor),
                          rule.temperature);
    };
    const float expected = static_cast<float>(k) * kSampleSize / static_cast<float>(n);
    const int rank = static_cast<int>(expected + 3.0f * __builtin_sqrtf(expected) + 5.0f);
    threshold[0] = quantile(rank);
    if (threshold[0] > rule.floor) {
      has_nan = stream_top_k(x, n, rule, edits, threshold[0], list);
      if (list->size >= k) {
        cut_top_k(rule, list);
        return has_nan;
      }
    }
    threshold[1] = quantile(4 * rank + 64);
    // At least k elements of the row are at or above the k-th of any part of it.
    if (k <= kSampleSize) threshold[2] = quantile(static_cast<int>(k));
    if (threshold[1] < threshold[0] && threshold[1] > threshold[2]) {
      list->size = 0;
      has_nan |= stream_top_k(x, n, rule, edits, threshold[1], list);
      if (list->size >= k) {
        cut_top_k(rule, list);
        return has_nan;
      }
    }
    if (!(threshold[2] < threshold[0])) threshold[2] = rule.floor;
  }
  list->size = 0;
  has_nan |= stream_top_k(x, n, rule, edits, threshold[2], list);
  if (list->size < k && threshold[2] > rule.floor) {  // edited tokens were in the sample
    list->size = 0;
    has_nan |= stream_top_k(x, n, rule, edits, rule.floor, list);
  }
  cut_top_k(rule, list);
  return has_nan;
}

class ListStages {
 protected:
  explicit ListStages(CandidateList list) : list_(list) {}

  // A row begins: its list is empty.
  void begin(float temperature, int fraction_bits, bool probabilities) {
    list_.size = 0;
    rule_.fraction_bits = fraction_bits;
    rule_.probabilities = probabilities;
    set_temperature(temperature, exponent_factor(temperature));
  }

  void set_temperature(float temperature, float factor) {
    temperature_ = temperature;
    rule_.factor = factor;
    rule_.uniform = false;
    // The lowest logit that is above -inf after the temperature.
    floor_ = lowest_logit(kMinusInfinityKey + 1, temperature);
  }

  // Looks for the largest logit of the list, of at least one; infinite ones are the support.
  void weigh_list() {
    pad(&list_);
    F32 top = splat(minus_infinity());
    for (int64_t i = 0; i < list_.size; i += kLanes) top = max(load(list_.value + i), top);
    rule_.max = reduce_max(top);
    max_ = tempered(rule_.max, temperature_);
    if (max_ == plus_infinity()) {
      rule_.uniform = true;
      keep_set(&list_, kept_from(lowest_logit(kPlusInfinityKey, temperature_)));
    }
  }

  // The smallest prefix of mass >= p of the list (> p where strict); whole: the mass that counts as
  // 1; 0: the mass of the list.
  void keep_top_p(float p, bool strict, bool high_index_first, uint64_t whole) {
    make_keys(&list_, temperature_);
    make_masses(&list_, rule_);
    const uint64_t total = total_mass(list_);
    const uint64_t target = mass_threshold(p, whole ? whole : total, strict);
    if (target <= total) keep_set(&list_, cut_list(target, high_index_first).set);
  }

  // The prefix of the list whose mass reaches target. Needs keys and masses.
  ListCut cut_list(uint64_t target, bool high_index_first) {
    const MassCut cut = find_mass_cut(list_, target);
    const TieCut ties = cut_ties(list_, cut.key, target - cut.mass_above, high_index_first);
    const float lowest = lowest_logit(cut.key, temperature_);
    if (cut.key == kPlusInfinityKey) {
      // Nothing is above these ties: a comparison with NaN is never true.
      return {
          {lowest, __builtin_nanf(""), ties.first_token, ties.last_token}, ties.kept, ties.mass};
    }
    return {{lowest, lowest_logit(cut.key + 1, temperature_), ties.first_token, ties.last_token},
            ties.kept + LMD_SIMD::sampling::count_from(list_.key, list_.size, cut.key + 1),
            ties.mass + cut.mass_above};
  }

  // The first token in order, or of its ties the last one.
  void keep_one(bool last) {
    const float best = list_.value[choose_largest(list_, temperature_)];
    keep_set(&list_, kept_from(class_bottom(best, temperature_)));
    const int64_t at = last ? list_.size - 1 : 0;
    list_.value[0] = list_.value[at];
    list_.token[0] = list_.token[at];
    list_.size = 1;
  }

  // The lowest logit, at least floor, with a value of this key or a larger one.
  float logit_of_key(uint32_t key) const { return larger(lowest_logit(key, temperature_), floor_); }

  CandidateList list_;
  TokenWeight rule_;
  float temperature_ = 1.0f;
  float floor_ = 0.0f;  // the lowest logit that counts
  float max_ = 0.0f;    // the largest value after the temperature
};

}  // namespace lmdecode::LMD_SIMD::sampling
