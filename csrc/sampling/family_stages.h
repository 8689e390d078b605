// The stages of the sampler family beyond top-k, top-p and min-p, on a list of candidates. A kernel
// header: see simd/vec.h.
//
// Entropies and variances come from sums of integers, as masses do: so what is kept depends neither
// on threads, nor on the batch, nor on the SIMD width.
#pragma once

#include "common/exp.h"
#include "sampling/list_stages.h"

namespace lmdecode::LMD_SIMD::sampling {

using namespace lmdecode::sampling;

constexpr double kLn2 = 0.69314718055994530942;

class FamilyStages : public ListStages {
 protected:
  using ListStages::ListStages;

  // The list's weights and what comes of them.
  struct Weights {
    uint64_t mass;      // of all, the weight 1 being 2^fraction_bits
    uint64_t surprise;  // sum of weight * exponent, likewise: the exponent is -log2(weight)
    double sum;         // of the weights
    double log_sum;
    double mean_exponent;
    double entropy() const { return log_sum + kLn2 * mean_exponent; }  // nats
  };

  Weights weigh() {
    make_masses(&list_, rule_);
    Weights w{};
    w.mass = total_mass(list_);
    w.surprise = surprise_mass();
    const double unit = static_cast<double>(uint64_t{1} << rule_.fraction_bits);
    w.sum = static_cast<double>(w.mass) / unit;
    w.log_sum = log_f64(w.sum);
    w.mean_exponent = static_cast<double>(w.surprise) / static_cast<double>(w.mass);
    return w;
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

  // The key of the smallest value >= the largest one + offset; above its own where offset > 0.
  uint32_t key_below_max(double offset) const {
    if (max_ == plus_infinity()) return kPlusInfinityKey + (offset > 0.0 ? 1 : 0);
    if (offset > 0.0) return order_key(max_) + 1;
    const double bound = static_cast<double>(max_) + offset;
    const float value = static_cast<float>(bound);  // nearest; the next one up where that is below
    return order_key(value) + (static_cast<double>(value) < bound ? 1 : 0);
  }

  // Keeps values >= the largest one + offset; where that is none, the first token in order, or all
  // that equal it.
  void keep_below_max(double offset, bool keep_ties) {
    const uint32_t key = key_below_max(offset);
    if (key <= order_key(max_)) return keep_set(&list_, kept_from(logit_of_key(key)));
    if (!keep_ties) return keep_one(/*last=*/false);
    keep_set(&list_, kept_from(class_bottom(rule_.max, temperature_)));
  }

  // The sum of the list's weights.
  double sum_weights() {
    make_masses(&list_, rule_);
    return static_cast<double>(total_mass(list_)) /
           static_cast<double>(uint64_t{1} << rule_.fraction_bits);
  }

  void keep_top_n_sigma(double sigmas, bool keep_ties) {
    if (max_ == plus_infinity()) return;
    double lowest = static_cast<double>(max_);
    const double top = lowest;
    for (int64_t i = 0; i < list_.size; ++i) {
      const double v = static_cast<double>(tempered(list_.value[i], temperature_));
      lowest = v < lowest ? v : lowest;
    }
    const double range = top - lowest;
    if (!(range > 0.0)) return;
    const int bits = rule_.fraction_bits;
    const double unit = static_cast<double>(uint64_t{1} << bits);
    uint64_t sum = 0, squares = 0;  // of shares of the range: 2^(bits - 3) and 2^bits are 1
    for (int64_t i = 0; i < list_.size; ++i) {
      const double v = static_cast<double>(tempered(list_.value[i], temperature_));
      const double share = (top - v) / range;
      sum += static_cast<uint64_t>(share * (unit * 0.125));
      squares += static_cast<uint64_t>(share * share * unit);
    }
    __extension__ using Wide = unsigned __int128;
    const uint64_t count = static_cast<uint64_t>(list_.size);
    const Wide all = static_cast<Wide>(count) * squares << (bits - 6);
    const Wide mean = static_cast<Wide>(sum) * sum;
    const double variance =
        static_cast<double>(all > mean ? all - mean : 0) /
        (static_cast<double>(static_cast<Wide>(count) * count) * (unit * 0.125) * (unit * 0.125));
    keep_below_max(-(sigmas * (range * __builtin_sqrt(variance))), keep_ties);
  }

  void keep_epsilon(double epsilon, bool keep_ties) {
    keep_below_max(log_f64(epsilon * sum_weights()), keep_ties);
  }

  void keep_eta(double epsilon, bool keep_ties) {
    const Weights w = weigh();
    const double log = log_f64(epsilon), other = 0.5 * log - w.entropy();
    keep_below_max(w.log_sum + (log < other ? log : other), keep_ties);
  }

  // The prefix whose own terms of the entropy come to at most `share` of it; of the first
  // max_tokens alone where that is not 0.
  void keep_top_h(double share, int64_t max_tokens) {
    make_keys(&list_, temperature_);
    if (max_tokens > 0 && max_tokens < list_.size) {
      select_top_k(&list_, max_tokens, /*keep_ties=*/false);
    }
    const Weights w = weigh();
    uint64_t* surprise = list_.spare_mass;
    for (int64_t i = 0; i < list_.size; i += kLanes) {
      MassSum::store_masses(surprise + i, scaled_surprise(load(list_.value + i)));
    }
    const int64_t padded = round_up_to_lanes(list_.size);
    for (int64_t i = list_.size; i < padded; ++i) surprise[i] = 0;
    const double unit = static_cast<double>(uint64_t{1} << rule_.fraction_bits);
    // Of the entropy, what tokens of these sums come to.
    const auto terms = [&](uint64_t mass, uint64_t exponents) {
      return (kLn2 * (static_cast<double>(exponents) / unit) +
              w.log_sum * (static_cast<double>(mass) / unit)) /
             w.sum;
    };
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
    const Weights w = weigh();
    const double top = static_cast<double>(rule_.max), factor = static_cast<double>(rule_.factor);
    for (int64_t i = 0; i < list_.size; ++i) {
      const double exponent =
          rule_.uniform ? 0.0 : (top - static_cast<double>(list_.value[i])) * factor;
      const double distance = exponent - w.mean_exponent;
      const double scaled = (distance < 0.0 ? -distance : distance) * 0x1p24;
      list_.key[i] =
          0xffffffffu - (scaled < 4294967294.0 ? static_cast<uint32_t>(scaled) : 0xfffffffeu);
    }
    const int64_t padded = round_up_to_lanes(list_.size);
    for (int64_t i = list_.size; i < padded; ++i) list_.key[i] = 0;
    const uint64_t target =
        p > 0.0 ? mass_threshold(static_cast<float>(p), w.mass, /*strict=*/false) : 1;
    const MassCut cut = find_mass_cut(list_, target);
    const int64_t ties =
        keep_ties ? list_.size : cut_ties(list_, cut.key, target - cut.mass_above, false).kept;
    keep_from(&list_, cut.key, ties);
  }

  // Of the tokens of at least this probability, if they are two or more, the last in order stays.
  void exclude_top_choices(double probability) {
    make_keys(&list_, temperature_);
    const uint32_t bound =
        probability > 0.0 ? key_below_max(log_f64(probability * sum_weights())) : 0;
    int64_t choices = 0, last = -1;
    for (int64_t i = 0; i < list_.size; ++i) {
      if (list_.key[i] < bound) continue;
      ++choices;
      if (last < 0 || list_.key[i] <= list_.key[last]) last = i;
    }
    if (choices < 2) return;
    int64_t out = 0;
    for (int64_t i = 0; i < list_.size; ++i) {
      if (list_.key[i] >= bound && i != last) continue;
      list_.value[out] = list_.value[i];
      list_.token[out] = list_.token[i];
      ++out;
    }
    list_.size = out;
  }

  // Mirostat's truncation: surprise, in bits, of at most mu.
  void keep_mirostat(double mu) {
    keep_below_max(log_f64(sum_weights()) - mu * kLn2, /*keep_ties=*/false);
  }

  // By the entropy of what the temperatures so far leave.
  double dynamic_temperature(double temperature, double range, double exponent) {
    const double low = temperature > range ? temperature - range : 0.0;
    if (list_.size <= 1) return temperature;
    const double share = weigh().entropy() / log_f64(static_cast<double>(list_.size));
    return low + (temperature + range - low) * power_of_share(share < 1.0 ? share : 1.0, exponent);
  }
};

}  // namespace lmdecode::LMD_SIMD::sampling
