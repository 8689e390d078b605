// The stages of the sampler family beyond top-k, top-p and min-p, on a list of candidates. A kernel
// header: see simd/vec.h.
//
// Entropies and variances come from sums of integers, as masses do: so what is kept depends neither
// on threads, nor on the batch, nor on the SIMD width.
#pragma once

#include "sampling/list_stages.h"
#include "sampling/stage_math.h"

namespace lmdecode::LMD_SIMD::sampling {

using namespace lmdecode::sampling;

class FamilyStages : public ListStages {
 protected:
  using ListStages::ListStages;

  RowWeights weights_of(uint64_t mass, uint64_t surprise) const {
    return row_weights(mass, surprise, rule_.fraction_bits);
  }

  RowWeights weigh() {
    make_masses(&list_, rule_);
    return weights_of(total_mass(list_), surprise_mass());
  }

  // The same of a whole row, whose largest logit is that of the rule, and finite; surprise only
  // where it is wanted.
  template <bool kSurprise, class T>
  RowWeights weigh_row(const T* x, int64_t n) const {
    const F32 scale = splat(float_of(static_cast<uint32_t>(127 + rule_.fraction_bits) << 23));
    const F32 m = splat(rule_.max), f = splat(rule_.factor), tiny = splat(0x1p-126f);
    const float bits = static_cast<float>(rule_.fraction_bits);
    MassSum mass, surprise;
    const auto add = [&](F32 a) {
      if constexpr (kSurprise) {
        // NaN and -inf come to 2^-125: nothing.
        const F32 weight = scaled_weight(a, m, f, 0.0f);
        mass.add(max(weight * scale, tiny));
        surprise.add(max(weight * exponents(a) * scale, tiny));
      } else {
        mass.add(scaled_weight(a, m, f, bits));
      }
    };
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      prefetch_ahead(x + i);
      add(load(x + i));
    }
    if (i < n) add(load_part(x + i, static_cast<int>(n - i), minus_infinity()));
    return weights_of(mass.total(), surprise.total());
  }

  // -log2 of the weight, as the weight rounds it.
  F32 exponents(F32 value) const {
    if (rule_.uniform) return splat(0.0f);
    const F32 e = (value - splat(rule_.max)) * splat(rule_.factor);
    return splat(0.0f) - max(e, splat(kMinExponent));
  }

  // floor(weight * exponent * 2^fraction_bits) of kLanes values, to be summed.
  F32 scaled_surprise(F32 value) const {
    const F32 scale = splat(float_of(static_cast<uint32_t>(127 + rule_.fraction_bits) << 23));
    return max(weights(rule_, value) * exponents(value) * scale, splat(0x1p-126f));
  }

  // The list is padded: see make_masses().
  uint64_t surprise_mass() const {
    MassSum sum;
    for (int64_t i = 0; i < list_.size; i += kLanes) {
      sum.add(scaled_surprise(load(list_.value + i)));
    }
    return sum.total();
  }

  // Keeps values >= the largest one + offset; where that is none, the first token in order, or all
  // that equal it.
  void keep_below_max(double offset, bool keep_ties) {
    const uint32_t key = key_below_max(max_, offset);
    if (key <= order_key(max_)) return keep_set(&list_, kept_from(logit_of_key(key)));
    if (!keep_ties) return keep_one(/*last=*/false);
    keep_set(&list_, kept_from(class_bottom(rule_.max, temperature_)));
  }

  // Minus `sigmas` standard deviations of the values of n logits, those outside (-inf, inf) left
  // out. Shares of the range are rounded to multiples of 2^-21; their sums are exact.
  template <class T>
  double sigma_offset(double sigmas, const T* x, int64_t n) const {
    const F32 t = splat(temperature_), zero = splat(0.0f), half = splat(0.5f);
    const F32 infinity = splat(plus_infinity());
    const auto at = [&](int64_t i) {
      const F32 a = i + kLanes <= n ? load(x + i)
                                    : load_part(x + i, static_cast<int>(n - i), minus_infinity());
      return temperature_ == 1.0f ? a : select(abs(a) == infinity, a, a / t);
    };
    F32 lowest = splat(minus_infinity());  // of the values with another sign
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += kLanes) {
      const F32 v = at(i);
      const Mask is_finite = infinity > abs(v);
      count += LMD_SIMD::count(bits(is_finite));
      lowest = max(select(is_finite, zero - v, splat(minus_infinity())), lowest);
    }
    const float bottom = -reduce_max(lowest);
    // Halves: the range of f32 is finite then.
    const float half_range = 0.5f * max_ - 0.5f * bottom;
    if (!(half_range > 0.0f)) return minus_infinity();
    const F32 top = splat(0.5f * max_), range = splat(half_range), tiny = splat(0x1p-126f);
    const F32 magic = splat(kRoundMagic);
    // A share as high * 2^11 + low, 0 <= low <= 2^11, so that f32 has all products exactly.
    MassSum sum, high_squares, products, low_squares;
    for (int64_t i = 0; i < n; i += kLanes) {
      const F32 v = at(i);
      const F32 share = select(infinity > abs(v), (top - v * half) / range, zero);
      const F32 whole = (share * splat(0x1p21f) + magic) - magic;
      const F32 high = max((whole * splat(0x1p-11f) - half) + magic - magic, zero);
      const F32 low = whole - high * splat(0x1p11f);
      sum.add(max(whole, tiny));
      high_squares.add(max(high * high, tiny));
      products.add(max(high * low, tiny));
      low_squares.add(max(low * low, tiny));
    }
    const ShareSums sums{sum.total(), high_squares.total(), products.total(), low_squares.total()};
    return -(sigmas * standard_deviation(half_range, sums, count));
  }

  // The prefix whose own terms of the entropy come to at most `share` of it; of the first
  // max_tokens alone where that is not 0.
  void keep_top_h(double share, int64_t max_tokens) {
    make_keys(&list_, temperature_);
    if (max_tokens > 0 && max_tokens < list_.size) {
      select_top_k(&list_, max_tokens, /*keep_ties=*/false);
    }
    const RowWeights w = weigh();
    uint64_t* surprise = list_.spare_mass;
    for (int64_t i = 0; i < list_.size; i += kLanes) {
      MassSum::store_masses(surprise + i, scaled_surprise(load(list_.value + i)));
    }
    const int64_t padded = round_up_to_lanes(list_.size);
    for (int64_t i = list_.size; i < padded; ++i) surprise[i] = 0;
    const EntropyTerms terms{w, mass_unit(rule_.fraction_bits)};
    const double most = share * terms(w.mass, w.surprise);
    const KeyRange range = key_range(list_.key, list_.size);
    // The terms of keys >= high are at most `most`, those of keys >= low are more.
    uint64_t low = range.low, high = static_cast<uint64_t>(range.high) + 1;
    uint64_t mass = 0, exponents = 0;  // of keys >= high
    if (terms(w.mass, w.surprise) <= most) return;
    while (high - low > 1) {
      const uint32_t middle = static_cast<uint32_t>((low + high) / 2);
      const uint64_t m = mass_from(list_.key, list_.mass, list_.size, middle);
      const uint64_t s = mass_from(list_.key, surprise, list_.size, middle);
      if (terms(m, s) <= most) {
        high = middle;
        mass = m;
        exponents = s;
      } else {
        low = middle;
      }
    }
    int64_t ties = 0;
    for (int64_t i = 0; i < list_.size; ++i) {
      if (list_.key[i] != low) continue;
      mass += list_.mass[i];
      exponents += surprise[i];
      if (terms(mass, exponents) > most && !(high > range.high && ties == 0)) break;
      ++ties;
    }
    keep_from(&list_, static_cast<uint32_t>(low), ties);
  }

  // The smallest set of mass >= p, of the tokens whose surprise is nearest to the entropy.
  void keep_typical(double p, bool keep_ties) {
    const RowWeights w = weigh();
    make_distance_keys(w);
    const uint64_t target = typical_target(p, w.mass);
    const MassCut cut = find_mass_cut(list_, target);
    const int64_t ties =
        keep_ties ? list_.size : cut_ties(list_, cut.key, target - cut.mass_above, false).kept;
    keep_from(&list_, cut.key, ties);
  }

  // Keys that are the larger, the nearer a token's surprise is to the entropy: by the distance in
  // logits, one rounding of f64 to f32.
  void make_distance_keys(const RowWeights& w) {
    const TypicalDistance from(rule_, w);
    const int64_t padded = round_up_to_lanes(list_.size);
    for (int64_t i = 0; i < padded; i += kLanes) {
      const F32 distance =
          from.alike ? splat(0.0f) : abs(subtract_f64(load(list_.value + i), from.max, -from.mean));
      store(list_.key + i, order_keys(distance) ^ splat_u32(0xffffffffu));
    }
    for (int64_t i = list_.size; i < padded; ++i) list_.key[i] = 0;
  }

  // Of the tokens of at least this probability, if they are two or more, the last in order stays.
  void exclude_top_choices(double probability) {
    make_keys(&list_, temperature_);
    uint32_t bound = 0;
    if (probability > 0.0) {
      make_masses(&list_, rule_);
      bound = key_below_max(max_, epsilon_offset(probability, weights_of(total_mass(list_), 0)));
    }
    const U32 least = splat_u32(bound);
    int64_t choices = 0, last = -1;
    for (int64_t i = 0; i < list_.size; i += kLanes) {
      uint32_t mask = bits(load(list_.key + i) >= least);
      if (i + kLanes > list_.size) mask &= (1u << (list_.size - i)) - 1;
      choices += count(mask);
      for (; mask != 0; mask &= mask - 1) {
        const int64_t at = i + __builtin_ctz(mask);
        if (last < 0 || list_.key[at] <= list_.key[last]) last = at;
      }
    }
    if (choices < 2) return;
    const int64_t size = list_.size;
    list_.size = 0;
    for (int64_t i = 0; i < size; i += kLanes) {
      uint32_t mask = ~bits(load(list_.key + i) >= least) & kAllLanes;
      if (last >= i && last < i + kLanes) mask |= 1u << (last - i);
      if (i + kLanes > size) mask &= (1u << (size - i)) - 1;
      push(&list_, mask, load(list_.value + i), load(list_.token + i));
    }
  }
};

}  // namespace lmdecode::LMD_SIMD::sampling
