// The stages of the sampler family beyond top-k, top-p and min-p, on a list of candidates. A kernel
// header: see simd/vec.h.
//
// Entropies and variances are computed from sums of integers, as masses are. So the kept tokens do
// not depend on threads, the batch or the SIMD width.
#pragma once

#include "sampling/list_stages.h"
#include "sampling/stage_math.h"

namespace lmdecode::LMD_SIMD::sampling {

using namespace lmdecode::sampling;

class ProbabilityFilters : public ListStages {
 protected:
  using ListStages::ListStages;

  RowWeights weights_of(uint64_t mass, uint64_t surprise) const {
    return row_weights(mass, surprise, rule_.fraction_bits);
  }

  RowWeights weigh() {
    make_masses(&list_, rule_);
    return weights_of(total_mass(list_), surprise_mass());
  }

  // The same for a whole row; its largest logit must be the rule's, and finite. Computes the
  // surprise only on request.
  template <bool kSurprise, class T>
  RowWeights weigh_row(const T* x, int64_t n) const {
    const F32 m = splat(rule_.max), f = splat(rule_.factor), tiny = splat(0x1p-126f);
    const float bits = static_cast<float>(rule_.fraction_bits);
    MassSum mass, surprise;
    const auto add = [&](F32 a) {
      // NaN and -inf come to 2^-125 of the unit: nothing.
      const F32 weight = scaled_weight(a, m, f, bits);
      mass.add(weight);
      if constexpr (kSurprise) surprise.add(max(weight * exponents(a), tiny));
    };
    int64_t i = 0;
    for (; i + kBlock <= n; i += kBlock) {
      prefetch_ahead(x + i);
      for (int j = 0; j < kBlockVectors; ++j) add(load(x + i + j * kLanes));
    }
    for (; i + kLanes <= n; i += kLanes) add(load(x + i));
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

  // Lists a row's tokens of about this weight or more: logits of listed_from_ or more. False, with
  // an empty list, if these are all tokens.
  template <class T>
  bool list_above(double weight, const T* x, int64_t n) {
    if (!(weight > 0.0) || !(rule_.factor > 0.0f)) return false;
    const double exponent = log_f64(weight) * kLog2E / static_cast<double>(rule_.factor);
    listed_from_ = static_cast<float>(static_cast<double>(rule_.max) + exponent);
    if (!(listed_from_ > floor_) || listed_from_ > rule_.max) return false;
    collect_set(x, n, kept_from(listed_from_), &list_);
    return true;
  }

  // Keeps values >= the largest one + offset; if there is none, the first token in order, or all
  // that equal it.
  void keep_below_max(double offset, bool keep_ties) {
    const uint32_t key = key_below_max(max_, offset);
    if (key <= order_key(max_)) return keep_set(&list_, kept_from(logit_of_key(key)));
    if (!keep_ties) return keep_one(/*last=*/false);
    keep_set(&list_, kept_from(class_bottom(rule_.max, temperature_)));
  }

  // Minus `sigmas` standard deviations of n logits, without those outside of (-inf, inf). Shares of
  // the range are rounded to multiples of 2^-21; their sums are exact.
  template <class T>
  double sigma_offset(double sigmas, const T* x, int64_t n) const {
    return temperature_ == 1.0f ? sigma_offset_of<false>(sigmas, x, n)
                                : sigma_offset_of<true>(sigmas, x, n);
  }

  template <bool kDivides, class T>
  double sigma_offset_of(double sigmas, const T* x, int64_t n) const {
    const F32 t = splat(temperature_), zero = splat(0.0f), none = splat(minus_infinity());
    const F32 infinity = splat(plus_infinity());
    const auto value = [&](F32 a) { return kDivides ? select(abs(a) == infinity, a, a / t) : a; };
    const auto at = [&](int64_t i) {
      return value(i + kLanes <= n ? load(x + i)
                                   : load_part(x + i, static_cast<int>(n - i), minus_infinity()));
    };
    int64_t count = 0;
    // The largest of the values with another sign, in four parts: a maximum waits for the last one.
    const auto look = [&](F32 v, F32 lowest) {
      const Mask is_finite = infinity > abs(v);
      count += LMD_SIMD::count(bits(is_finite));
      return max(select(is_finite, zero - v, none), lowest);
    };
    F32 part0 = none, part1 = none, part2 = none, part3 = none;
    int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
      part0 = look(value(load(x + i)), part0);
      part1 = look(value(load(x + i + kLanes)), part1);
      part2 = look(value(load(x + i + 2 * kLanes)), part2);
      part3 = look(value(load(x + i + 3 * kLanes)), part3);
    }
    for (; i < n; i += kLanes) part0 = look(at(i), part0);
    const F32 lowest = max(max(part0, part1), max(part2, part3));
    const float bottom = -reduce_max(lowest);
    // Halves: the range of f32 is finite then.
    const float half_range = 0.5f * max_ - 0.5f * bottom;
    if (!(half_range > 0.0f)) return minus_infinity();
    const float shares = shares_of(half_range);
    const F32 top = splat(0.5f * max_), scale = splat(shares), magic = splat(kRoundMagic);
    const F32 minus_half = splat(-0.5f);
    const U32 number = splat_u32(0x3fffff);  // the low bits of kRoundMagic + share
    ShareSums sums;
    constexpr int64_t kChunk = int64_t{1024} * kLanes;  // no lane's sum of shares comes to 2^32
    for (int64_t begin = 0; begin < n; begin += kChunk) {
      U32 sum = splat_u32(0);
      U64 even = splat_u64(0), odd = splat_u64(0);
      const int64_t end = begin + kChunk < n ? begin + kChunk : n;
      for (int64_t i = begin; i < end; i += kLanes) {
        const F32 v = at(i);
        const F32 below = select(infinity > abs(v), multiply_add(v, minus_half, top), zero);
        const U32 share = bit_cast_u32(multiply_add(below, scale, magic)) & number;
        const U64 low = even_lanes(share), high = odd_lanes(share);
        sum = sum + share;
        even = even + multiply_low(low, low);
        odd = odd + multiply_low(high, high);
      }
      alignas(64) uint32_t part[kLanes];
      alignas(64) uint64_t square[kLanes / 2];
      store(part, sum);
      for (const uint32_t p : part) sums.sum += p;
      store(square, even + odd);
      for (const uint64_t p : square) sums.squares += p;
    }
    return -(sigmas * standard_deviation(shares, sums, count));
  }

  // The prefix whose terms of the entropy sum to at most `share` of the entropy; if max_tokens is
  // not 0, only of the first max_tokens.
  void keep_top_h(double share, int64_t max_tokens) {
    if (max_tokens > 0 && max_tokens < list_.size) {
      make_keys(&list_, temperature_);
      select_top_k(&list_, max_tokens, /*keep_ties=*/false);
    }
    const RowWeights w = weigh();
    const EntropyTerms terms{w, mass_unit(rule_.fraction_bits)};
    const double most = share * terms(w.mass, w.surprise);
    if (terms(w.mass, w.surprise) > most) cut_top_h(terms, most);
  }

  // The prefix of the list whose terms sum to at most `most`; the whole list's sum is larger. Needs
  // masses.
  void cut_top_h(const EntropyTerms& terms, double most) {
    make_keys(&list_, temperature_);
    uint64_t* surprise = list_.spare_mass;
    for (int64_t i = 0; i < list_.size; i += kLanes) {
      MassSum::store_masses(surprise + i, scaled_surprise(load(list_.value + i)));
    }
    const int64_t padded = round_up_to_lanes(list_.size);
    for (int64_t i = list_.size; i < padded; ++i) surprise[i] = 0;
    const KeyRange range = key_range(list_.key, list_.size);
    // Invariant: the terms of keys >= high sum to at most `most`, the terms of keys >= low to more.
    uint64_t low = range.low, high = static_cast<uint64_t>(range.high) + 1;
    uint64_t mass = 0, exponents = 0;  // of keys >= high
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

  // The same for a whole row, from a list of its relevant tokens. False, with an empty list, if
  // these do not suffice.
  template <class T>
  bool list_top_h(double share, const T* x, int64_t n) {
    const RowWeights w = weigh_row<true>(x, n);
    const EntropyTerms terms{w, mass_unit(rule_.fraction_bits)};
    const double all = terms(w.mass, w.surprise), most = share * all;
    if (!(all > most)) return false;
    // A token below probability p < 1 / e has a term of at most -p log(p): all n such terms sum to
    // no more than the part left out.
    const double part = (all - most) / static_cast<double>(n);
    double p = part;
    for (int i = 0; i < 4 && p > 0.0 && p < 0.3; ++i) p = part / -log_f64(p);
    if (!(p > 0.0 && p < 0.3) || !list_above(p * w.sum, x, n)) return false;
    make_masses(&list_, rule_);
    if (terms(total_mass(list_), surprise_mass()) > most) {
      cut_top_h(terms, most);
      return true;
    }
    list_.size = 0;
    return false;
  }

  // The smallest set of mass >= p, of the tokens with the surprise nearest to the entropy.
  void keep_typical(double p, bool keep_ties) {
    const RowWeights w = weigh();
    cut_typical(w, typical_target(p, w.mass), keep_ties, /*beyond=*/0);
  }

  // Keeps the part of the list that makes up the target mass; the mass of the list reaches it.
  // False if unlisted tokens may belong to it: `beyond` is a key of such tokens. Needs masses.
  bool cut_typical(const RowWeights& w, uint64_t target, bool keep_ties, uint32_t beyond) {
    make_distance_keys(w);
    const MassCut cut = find_mass_cut(list_, target);
    if (cut.key <= beyond) return false;
    const int64_t ties =
        keep_ties ? list_.size : cut_ties(list_, cut.key, target - cut.mass_above, false).kept;
    keep_from(&list_, cut.key, ties);
    return true;
  }

  // The same of a whole row, as list_top_h(): tokens of little mass together, and farther from the
  // entropy than the likeliest one, are left out.
  template <class T>
  bool list_typical(double p, bool keep_ties, const T* x, int64_t n) {
    const RowWeights w = weigh_row<true>(x, n);
    const TypicalDistance distance(rule_, w);
    if (distance.alike) return false;
    const double below = (1.0 - p) * w.sum / static_cast<double>(n);
    const double nearest = portable_exp_f64(-2.0 * kLn2 * w.mean_exponent);
    if (!list_above(below < nearest ? below : nearest, x, n)) return false;
    const uint64_t target = typical_target(p, w.mass);
    make_masses(&list_, rule_);
    const uint32_t beyond = ~order_key(distance.of(listed_from_));
    if (total_mass(list_) >= target && cut_typical(w, target, keep_ties, beyond)) return true;
    list_.size = 0;
    return false;
  }

  // Keys that grow as a token's surprise gets nearer to the entropy: by the distance in logits, one
  // rounding of f64 to f32.
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

  // If two or more tokens have at least this probability, drops all of them but the last in order.
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

  float listed_from_ = 0.0f;  // list_above()
};

}  // namespace lmdecode::LMD_SIMD::sampling
