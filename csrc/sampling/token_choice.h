// Draws one of the kept tokens: the largest weight / noise, at ties the first in list order. A kernel header.
#pragma once

#include "common/token_noise.h"
#include "sampling/candidate_list.h"

namespace lmdecode::LMD_SIMD {

// How the logits of a row become weights and masses.
struct WeightRule {
  float max = 0.0f;
  float factor = 0.0f;
  int fraction_bits = 43;
  bool uniform = false;        // the support is infinite: every weight is 1
  bool probabilities = false;  // the logits are the weights

  float weight(float value) const {
    if (uniform) return 1.0f;
    if (probabilities) return value > 0.0f ? value : 0.0f;
    return token_weight(value, max, factor);
  }
};

inline F32 weights(const WeightRule& rule, F32 value) {
  if (rule.uniform) return splat(1.0f);
  if (rule.probabilities) return max(value, splat(0.0f));
  return scaled_weight(value, splat(rule.max), splat(rule.factor), 0.0f);
}

// Fills list->mass, zeros up to the next multiple of kLanes.
inline void make_masses(CandidateList* list, const WeightRule& rule) {
  const float scale = float_of(static_cast<uint32_t>(127 + rule.fraction_bits) << 23);
  // MassSum takes no zero: 2^-126 has mass 0.
  const F32 one = splat(1.0f), tiny = splat(0x1p-126f), scales = splat(scale);
  for (int64_t i = 0; i < list->size; i += kLanes) {
    const F32 value = load(list->value + i);
    F32 scaled;
    if (rule.uniform) {
      scaled = scales;
    } else if (rule.probabilities) {
      const F32 p = max(value, splat(0.0f));
      scaled = max(select(p >= one, one, p) * scales, tiny);
    } else {
      scaled = scaled_weight(value, splat(rule.max), splat(rule.factor), static_cast<float>(rule.fraction_bits));
    }
    MassSum::store_masses(list->mass + i, scaled);
  }
  const int64_t padded = round_up_to_lanes(list->size);
  for (int64_t i = list->size; i < padded; ++i) list->mass[i] = 0;
}

inline uint64_t total_mass(const CandidateList& list) {
  uint64_t total = 0;
  for (int64_t i = 0; i < list.size; ++i) total += list.mass[i];
  return total;
}

// The largest logit; ties to the first.
inline int64_t choose_largest(const CandidateList& list, float temperature) {
  int64_t best = 0;
  float best_value = tempered(list.value[0], temperature);
  for (int64_t i = 1; i < list.size; ++i) {
    if (!(list.value[i] > list.value[best])) continue;
    const float value = tempered(list.value[i], temperature);  // different logits may come to the same value
    if (value > best_value) {
      best = i;
      best_value = value;
    }
  }
  return best;
}

// score = weight / (|q| + eps). q of the i-th candidate is q[token * stride], or q[i * stride] where by_rank; -1 where it
// is NaN.
inline int64_t choose_by_noise(const CandidateList& list, const WeightRule& rule, const float* q, int64_t stride,
                               float eps, bool by_rank, bool* has_nan) {
  alignas(64) float noise[kLanes], score[kLanes];
  int64_t best = 0;
  float best_score = -2.0f;
  for (int64_t i = 0; i < list.size; i += kLanes) {
    const int n = static_cast<int>(list.size - i < kLanes ? list.size - i : kLanes);
    for (int j = 0; j < n; ++j) noise[j] = q[(by_rank ? i + j : static_cast<int64_t>(list.token[i + j])) * stride];
    for (int j = n; j < kLanes; ++j) noise[j] = 1.0f;
    const F32 a = load(noise);
    const Mask nan = is_nan(a, a);
    F32 s = weights(rule, load(list.value + i)) / (abs(a) + splat(eps));
    // 0 / 0, of a probability of 0: never preferred.
    s = select(is_nan(s, s), splat(-1.0f), s);
    *has_nan |= bits(nan) != 0;
    if (bits(s > splat(best_score)) == 0) continue;
    store(score, s);
    for (int j = 0; j < n; ++j) {
      if (score[j] > best_score) {
        best_score = score[j];
        best = i + j;
      }
    }
  }
  return best;
}

// The high words of the noise of kLanes tokens.
inline U32 noise_words(U32 token, uint64_t seed, uint64_t position) {
  U32 c0 = shift_right<2>(token), c1 = splat_u32(static_cast<uint32_t>(position));
  U32 c2 = splat_u32(static_cast<uint32_t>(position >> 32)), c3 = splat_u32(0);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    U32 high0, low0, high1, low1;
    multiply(c0, kPhiloxM0, &high0, &low0);
    multiply(c2, kPhiloxM1, &high1, &low1);
    c0 = high1 ^ c1 ^ splat_u32(k0);
    c1 = low1;
    c2 = high0 ^ c3 ^ splat_u32(k1);
    c3 = low0;
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  const U32 word = token & splat_u32(3);
  return select(word == splat_u32(0), c0,
                select(word == splat_u32(1), c1, select(word == splat_u32(2), c2, c3)));
}

// score = weight / token_noise(seed, position, token) in f64. The noise e of a uniform v lies in [v, v / (1 - v)], so the
// high words alone bound every score; only the few tokens whose upper bound reaches the best lower bound are computed.
// `upper` is scratch for the list's size rounded up to kLanes.
inline int64_t choose_by_seed(const CandidateList& list, const WeightRule& rule, int64_t seed, int64_t position,
                              float* upper) {
  const F32 ulp_up = splat(1.0f + 0x1p-18f), ulp_down = splat(1.0f - 0x1p-18f), one = splat(1.0f);
  const F32 unit = splat(0x1p-32f);
  F32 best_lower = splat(-1.0f);
  for (int64_t i = 0; i < list.size; i += kLanes) {
    const U32 word = noise_words(load(list.token + i), static_cast<uint64_t>(seed), static_cast<uint64_t>(position));
    const F32 weight = weights(rule, load(list.value + i));
    const F32 v = convert_u32(word) * unit;
    store(upper + i, weight * ulp_up / v);  // v = 0: +inf
    const F32 v_up = (convert_u32(word) + one) * unit * ulp_up;
    F32 lower = weight * (one - v_up) * ulp_down / v_up;
    if (i + kLanes > list.size) {
      const U32 lane = iota_u32();
      lower = select(lane >= splat_u32(static_cast<uint32_t>(list.size - i)), splat(-1.0f), lower);
    }
    best_lower = max(lower, best_lower);
  }
  const F32 bound = splat(reduce_max(best_lower));
  int64_t best = -1;
  double best_score = 0.0;
  for (int64_t i = 0; i < list.size; i += kLanes) {
    uint32_t mask = bits(load(upper + i) >= bound);
    if (i + kLanes > list.size) mask &= (1u << (list.size - i)) - 1;
    for (; mask != 0; mask &= mask - 1) {
      const int64_t j = i + __builtin_ctz(mask);
      const double score = static_cast<double>(rule.weight(list.value[j])) / token_noise(seed, position, list.token[j]);
      if (best < 0 || score > best_score) {
        best = j;
        best_score = score;
      }
    }
  }
  return best < 0 ? 0 : best;
}

}  // namespace lmdecode::LMD_SIMD
