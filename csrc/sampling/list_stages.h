// The stages on a list of candidates, each of which keeps a part of it; what top_k_top_p_sample and
// the sampler family share. A kernel header: see simd/vec.h.
#pragma once

#include "sampling/row_parameters.h"
#include "sampling/token_choice.h"
#include "sampling/top_k_candidates.h"
#include "sampling/top_p_cut.h"

namespace lmdecode::LMD_SIMD::sampling {

using namespace lmdecode::sampling;

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

  // The smallest prefix of mass >= p of the list (> p where strict); whole: what 1 is, 0: the mass
  // of the list.
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

  // The lowest logit whose value has this key or a larger one, and counts at all.
  float logit_of_key(uint32_t key) const { return larger(lowest_logit(key, temperature_), floor_); }

  CandidateList list_;
  TokenWeight rule_;
  float temperature_ = 1.0f;
  float floor_ = 0.0f;  // the lowest logit that counts
  float max_ = 0.0f;    // the largest value after the temperature
};

}  // namespace lmdecode::LMD_SIMD::sampling
