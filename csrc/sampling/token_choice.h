// Draws one of the kept tokens: the largest weight / noise, at ties the first in list order. A
// kernel header.
#pragma once

#include "common/token_noise.h"
#include "sampling/candidate_list.h"
#include "sampling/token_weight.h"

namespace lmdecode::LMD_SIMD::sampling {

using namespace lmdecode::sampling;

inline F32 weights(const TokenWeight& rule, F32 value) {
  if (rule.uniform) return splat(1.0f);
  if (rule.probabilities) return max(value, splat(0.0f));
  return scaled_weight(value, splat(rule.max), splat(rule.factor), 0.0f);
}

// Fills list->mass, zeros up to the next multiple of kLanes.
inline void make_masses(CandidateList* list, const TokenWeight& rule) {
  pad(list);
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
      scaled = scaled_weight(value, splat(rule.max), splat(rule.factor),
                             static_cast<float>(rule.fraction_bits));
    }
    MassSum::store_masses(list->mass + i, scaled);
  }
  const int64_t padded = round_up_to_lanes(list->size);
  for (int64_t i = list->size; i < padded; ++i) list->mass[i] = 0;
}

inline uint64_t total_mass(const CandidateList& list) {
  MassSum total;
  const Mask all = splat_u32(0) == splat_u32(0);
  for (int64_t i = 0; i < list.size; i += kLanes) total.add(list.mass + i, all);
  return total.total();
}

// The largest logit; ties to the first.
inline int64_t choose_largest(const CandidateList& list, float temperature) {
  int64_t best = 0;
  float best_value = tempered(list.value[0], temperature);
  for (int64_t i = 1; i < list.size; ++i) {
    if (!(list.value[i] > list.value[best])) continue;
    const float value =
        tempered(list.value[i], temperature);  // different logits may come to the same value
    if (value > best_value) {
      best = i;
      best_value = value;
    }
  }
  return best;
}

// score = weight / (|q| + eps). q of the i-th candidate is q[token * stride], or q[i * stride]
// where by_rank; -1 where it is NaN.
inline int64_t choose_by_noise(const CandidateList& list, const TokenWeight& rule, const float* q,
                               int64_t stride, float eps, bool by_rank, bool* has_nan) {
  alignas(64) float noise[kLanes], score[kLanes];
  int64_t best = 0;
  float best_score = -2.0f;
  for (int64_t i = 0; i < list.size; i += kLanes) {
    const int n = static_cast<int>(list.size - i < kLanes ? list.size - i : kLanes);
    for (int j = 0; j < n; ++j)
      noise[j] = q[(by_rank ? i + j : static_cast<int64_t>(list.token[i + j])) * stride];
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

// Philox, lane by lane, with counters (c0, position, 0): the high words of the noise of four tokens
// a lane.
inline void philox_lanes(U32 counter, uint64_t seed, uint64_t position, U32 (&word)[4]) {
  U64 c0[2] = {even_lanes(counter), odd_lanes(counter)}, c1[2], c2[2], c3[2];
  for (int h = 0; h < 2; ++h) {
    c1[h] = splat_u64(position & 0xffffffffu);
    c2[h] = splat_u64(position >> 32);
    c3[h] = splat_u64(0);
  }
  const U64 m0 = splat_u64(kPhiloxM0), m1 = splat_u64(kPhiloxM1);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const U64 key0 = splat_u64(k0), key1 = splat_u64(k1);
    for (int h = 0; h < 2; ++h) {
      const U64 p0 = multiply_low(c0[h], m0), p1 = multiply_low(c2[h], m1);
      c0[h] = xor3(high_half(p1), c1[h], key0);
      c1[h] = p1;  // its low half; nothing looks at the high halves
      c2[h] = xor3(high_half(p0), c3[h], key1);
      c3[h] = p0;
    }
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  word[0] = merge_lanes(c0[0], c0[1]);
  word[1] = merge_lanes(c1[0], c1[1]);
  word[2] = merge_lanes(c2[0], c2[1]);
  word[3] = merge_lanes(c3[0], c3[1]);
}

// The high words of kLanes tokens, anywhere in the row.
inline U32 noise_words(U32 token, uint64_t seed, uint64_t position) {
  U32 word[4];
  philox_lanes(shift_right<2>(token), seed, position, word);
  const U32 which = token & splat_u32(3);
  return select(
      which == splat_u32(0), word[0],
      select(which == splat_u32(1), word[1], select(which == splat_u32(2), word[2], word[3])));
}

// Draws by internal noise: score = weight / token_noise(seed, position, token) in f64. The noise of
// a uniform v lies in [v, v / (1 - v)], so the high words alone bound every score; only the few
// tokens whose upper bound reaches the best lower bound are computed.
class ScoreBounds {
 public:
  // Stores upper bounds of the scores of kLanes tokens; lanes outside `valid` get -1.
  void add(F32 weight, U32 word, uint32_t valid, float* upper) {
    const F32 one = splat(1.0f), none = splat(-1.0f);
    // v lies in [r, r + 1] * 2^-32; 2^-10 covers every rounding below, where v is not tiny.
    const F32 v = convert_u32(word) * splat(0x1p-32f);
    const F32 ratio = weight * approximate_reciprocal(v);  // v = 0: +inf
    F32 high = ratio * splat(1.0f + 0x1p-10f);
    F32 low = ratio * ((one - v) * splat(1.0f - 0x1p-10f) - splat(0x1p-10f));
    low = select(v > splat(0x1p-20f), low, none);
    low = select(low > splat(0x1p126f), splat(0x1p126f), low);  // an overflow would not be a bound
    if (valid != kAllLanes) {
      const Mask mask = mask_of(valid);
      high = select(mask, high, none);
      low = select(mask, low, none);
    }
    store(upper, high);
    best_ = max(low, best_);
  }
  // A score that some token reaches; not below 0, so that no excluded lane, -1, reaches it.
  float best() const {
    const float best = reduce_max(best_);
    return best > 0.0f ? best : 0.0f;
  }

 private:
  static Mask mask_of(uint32_t valid) {
    // Bit i of valid to lane i.
    const U32 lane_bit = shift_left_one(iota_u32());
    return (splat_u32(valid) & lane_bit) == lane_bit;
  }
  F32 best_ = splat(-1.0f);
};

class ScoreMaximum {
 public:
  ScoreMaximum(int64_t seed, int64_t position) : seed_(seed), position_(position) {}

  void add(int64_t at, float weight, uint32_t token) {
    const double score = static_cast<double>(weight) / token_noise(seed_, position_, token);
    if (at_ < 0 || score > score_) {
      at_ = at;
      score_ = score;
    }
  }
  bool found() const { return at_ >= 0; }
  int64_t at() const { return at_ < 0 ? 0 : at_; }

 private:
  int64_t seed_, position_, at_ = -1;
  double score_ = 0.0;
};

// `upper` is scratch for the list's size rounded up to kLanes.
inline int64_t choose_by_seed(const CandidateList& list, const TokenWeight& rule, int64_t seed,
                              int64_t position, float* upper) {
  ScoreBounds bounds;
  for (int64_t i = 0; i < list.size; i += kLanes) {
    const U32 word = noise_words(load(list.token + i), static_cast<uint64_t>(seed),
                                 static_cast<uint64_t>(position));
    const int64_t left = list.size - i;
    const uint32_t valid = left < kLanes ? (1u << left) - 1 : kAllLanes;
    bounds.add(weights(rule, load(list.value + i)), word, valid, upper + i);
  }
  const F32 bound = splat(bounds.best());
  ScoreMaximum best(seed, position);
  for (int64_t i = 0; i < list.size; i += kLanes) {
    for (uint32_t mask = bits(load(upper + i) >= bound); mask != 0; mask &= mask - 1) {
      const int64_t j = i + __builtin_ctz(mask);
      if (j >= list.size || (upper[j] == 0.0f && best.found()))
        continue;  // a weight of 0 wins nothing
      best.add(j, rule.weight(list.value[j]), list.token[j]);
    }
  }
  return best.at();
}

// The same over a whole row: the chosen token among those of the set, and their number. One Philox
// block serves four neighbouring tokens.
struct RowChoice {
  int64_t token;
  int64_t kept;
};

template <class T>
RowChoice choose_by_seed(const T* x, int64_t n, const KeptSet& set, const TokenWeight& rule,
                         int64_t seed, int64_t position, float* upper) {
  const F32 lowest = splat(set.lowest), above = splat(set.above_ties);
  const U32 first = splat_u32(set.first_tie), last = splat_u32(set.last_tie);
  const bool has_ties = set.above_ties > set.lowest;
  ScoreBounds bounds;
  int64_t kept = 0;
  for (int64_t i = 0; i < n; i += 4 * kLanes) {
    U32 word[4];
    philox_lanes(order4() + splat_u32(static_cast<uint32_t>(i >> 2)), static_cast<uint64_t>(seed),
                 static_cast<uint64_t>(position), word);
    transpose4(word);
    for (int j = 0; j < 4 && i + j * kLanes < n; ++j) {
      const int64_t at = i + j * kLanes;
      const F32 a = at + kLanes <= n
                        ? load(x + at)
                        : load_part(x + at, static_cast<int>(n - at), minus_infinity());
      uint32_t valid = bits(a >= lowest);
      if (has_ties) {
        const U32 token = iota_u32() + splat_u32(static_cast<uint32_t>(at));
        valid &= bits(a >= above) | (bits(token >= first) & bits(last >= token));
      }
      if (valid == 0) {
        store(upper + at, splat(-1.0f));
        continue;
      }
      kept += count(valid);
      bounds.add(weights(rule, a), word[j], valid, upper + at);
    }
  }
  const F32 bound = splat(bounds.best());
  ScoreMaximum best(seed, position);
  for (int64_t i = 0; i < n; i += kLanes) {
    for (uint32_t mask = bits(load(upper + i) >= bound); mask != 0; mask &= mask - 1) {
      const int64_t j = i + __builtin_ctz(mask);
      if (j >= n || (upper[j] == 0.0f && best.found())) continue;
      best.add(j, rule.weight(to_float(x[j])), static_cast<uint32_t>(j));
    }
  }
  return {best.at(), kept};
}

}  // namespace lmdecode::LMD_SIMD::sampling
