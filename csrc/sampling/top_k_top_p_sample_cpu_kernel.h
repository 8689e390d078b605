// One row of top_k_top_p_sample on the CPU, compiled once for each CPU capability. See simd/vec.h.
//
// Two ways lead to the kept set. With top-k (and in a few rare cases) the row is streamed once into
// a short list of candidates, and the other stages work on the list. Top-p alone streams twice, for
// the maximum and for the masses, and lists only the band of tokens around the cut. Thresholds are
// guessed from a sample of the row and verified exactly afterwards; a wrong guess costs another
// pass and changes nothing else.
#pragma once

#include "sampling/list_stages.h"

namespace lmdecode::LMD_SIMD::sampling {

using namespace lmdecode::sampling;

template <class T>
class CpuRowSampler : private ListStages {
 public:
  CpuRowSampler(const TopKTopPSampleParams& params, const DialectRules& rules, CandidateList list)
      : ListStages(list), params_(params), rules_(rules), n_(params.vocab) {}

  void run(const T* x, int64_t row) {
    x_ = x;
    row_ = row;
    parameters_ = parameters_of_row(params_, rules_, row);
    status_ = parameters_.status;
    out_ = params_.kept_logits ? params_.kept_logits + row * n_ : nullptr;
    if (parameters_.greedy) {
      greedy();
    } else {
      filtered();
    }
    params_.status[row] = status_;
  }

 private:
  float filler() const { return rules_.probabilities ? 0.0f : minus_infinity(); }

  void finish(int64_t index, int64_t kept, float logprob) {
    params_.index[row_] = index;
    params_.kept_count[row_] = static_cast<int32_t>(kept);
    if (params_.logprob) params_.logprob[row_] = logprob;
  }

  void finish_empty() {
    status_ |= kStatusEmpty;
    if (out_) fill(out_, n_, filler());
    finish(0, 0, minus_infinity());
  }

  // A row that another thread changes during the call may have lost what an earlier pass found. Its
  // result is then meaningless, but clamped to an index, and nothing is written past the row.
  int64_t in_row(int64_t token) const { return token < n_ ? token : n_ - 1; }

  void note_nan(bool has_nan) {
    if (has_nan) status_ |= kStatusNan;
  }

  void greedy() {
    const RowMax scan = scan_max(x_, n_);
    note_nan(scan.has_nan);
    if (!(scan.max > minus_infinity())) return finish_empty();
    const int64_t index = in_row(find_first(x_, n_, scan.max, kept_from(scan.max)));
    if (out_) {
      fill(out_, n_, filler());
      out_[index] = to_float(x_[index]);
    }
    finish(index, 1, 0.0f);
  }

  void filtered() {
    begin(parameters_.temperature, parameters_.fraction_bits, rules_.probabilities);
    const bool min_p_first = rules_.min_p_first && parameters_.min_p_mode != MinPMode::kOff;
    if (parameters_.top_k > 0 && !min_p_first) {
      note_nan(collect_top_k(x_, n_, top_k_rule(), NoEdits{}, &list_));
      return filter_list(/*min_p_left=*/true);
    }
    const RowMax scan = scan_max(x_, n_);
    note_nan(scan.has_nan);
    if (!(scan.max >= floor_)) return finish_empty();
    max_ = tempered(scan.max, parameters_.temperature);
    if (max_ == plus_infinity() || min_p_first || rules_.probabilities) {
      float bound = max_ == plus_infinity()
                        ? lowest_logit(kPlusInfinityKey, parameters_.temperature)
                        : floor_;
      if (min_p_first) bound = larger(bound, min_p_logit());
      collect_set(x_, n_, kept_from(bound), &list_);
      if (parameters_.top_k > 0) cut_top_k(top_k_rule(), &list_);
      return filter_list(/*min_p_left=*/!min_p_first);
    }
    rule_.max = scan.max;
    filter_row();
  }

  TopKRule top_k_rule() const {
    return {parameters_.top_k, parameters_.temperature, floor_, rules_.keep_top_k_ties};
  }

  // The lowest logit that min-p keeps.
  float min_p_logit() const {
    return logit_of_key(min_p_key(parameters_, max_, rules_.probabilities));
  }

  // ---- the stages after top-k, on the list

  void filter_list(bool min_p_left) {
    if (list_.size == 0) return finish_empty();
    weigh_list();
    if (parameters_.top_p_mode == TopPMode::kOneToken) {
      keep_one(rules_.high_index_first);
    } else if (parameters_.top_p_mode == TopPMode::kMass) {
      keep_top_p(parameters_.top_p, rules_.strict_top_p, rules_.high_index_first,
                 rules_.probabilities ? uint64_t{1} << parameters_.fraction_bits : 0);
    }
    if (min_p_left && parameters_.min_p_mode != MinPMode::kOff) keep_min_p();
    finish_list();
  }

  void keep_min_p() {
    if (parameters_.min_p_mode == MinPMode::kOneToken) return keep_one(/*last=*/false);
    keep_set(&list_, kept_from(min_p_logit()));
  }

  // ---- top-p or no filter at all, on the row

  void filter_row() {
    if (parameters_.top_p_mode == TopPMode::kOneToken) {
      const float bound = class_bottom(rule_.max, temperature_);
      const int64_t token =
          in_row(rules_.high_index_first ? find_last(x_, n_, bound)
                                         : find_first(x_, n_, bound, kept_from(bound)));
      list_.value[0] = to_float(x_[token]);
      list_.token[0] = static_cast<uint32_t>(token);
      list_.size = 1;
      return finish_list();
    }
    RowCut cut{kept_from(floor_), -1, 0, false};
    if (parameters_.top_p_mode == TopPMode::kMass) cut = cut_row();
    const bool min_p = parameters_.min_p_mode != MinPMode::kOff;
    const bool many = cut.kept < 0 || cut.kept > n_ / tuning::kDenseNoiseShare;
    if (!min_p && many &&
        (parameters_.noise == NoiseMode::kNone || parameters_.noise == NoiseMode::kInternal)) {
      return finish_row(cut);
    }
    if (cut.listed) {
      keep_set(&list_, cut.set);
    } else {
      list_.size = 0;
      const float bound = min_p ? larger(cut.set.lowest, min_p_logit()) : cut.set.lowest;
      cut.set.lowest = bound;  // where min-p raises it, the ties at the old cut are below
      collect_set(x_, n_, cut.set, &list_);
    }
    if (min_p) keep_min_p();
    finish_list();
  }

  // Draws from a kept set too large to be listed.
  void finish_row(RowCut cut) {
    int64_t index;
    if (parameters_.noise == NoiseMode::kInternal) {
      const RowChoice choice =
          choose_by_seed(x_, n_, cut.set, rule_, parameters_.seed, parameters_.position,
                         reinterpret_cast<float*>(list_.spare_key));
      index = choice.token;
      cut.kept = choice.kept;
    } else {
      index = in_row(find_first(x_, n_, class_bottom(rule_.max, temperature_), cut.set));
      if (cut.kept < 0) cut.kept = count_from(x_, n_, floor_);
    }
    float logprob = 0.0f;
    if (params_.logprob) {
      if (cut.mass == 0) {
        list_.size = 0;
        cut.mass = scan_masses<false>(x_, n_, rule_.max, rule_.factor, rule_.fraction_bits,
                                      plus_infinity(), 0.0f, &list_)
                       .total;
      }
      logprob = this->logprob(to_float(x_[index]), cut.mass);
    }
    if (out_) write_kept(x_, n_, cut.set, parameters_.temperature, out_);
    finish(index, cut.kept, logprob);
  }

  float logprob(float value, uint64_t kept_mass) const {
    return log_probability(rule_.weight(value), kept_mass, parameters_.fraction_bits);
  }

  RowCut cut_row() {
    using namespace tuning;
    Band band = n_ < kMinSampledVocab ? Band{floor_, 0.0f, false} : guess_band();
    for (int retry = 0;; ++retry) {
      list_.size = 0;
      const MassScan scan = band.bounded ? scan_band<true>(band) : scan_band<false>(band);
      const uint64_t target = mass_threshold(parameters_.top_p, scan.total, rules_.strict_top_p);
      if (scan.above < target) {
        make_masses(&list_, rule_);
        if (scan.above + total_mass(list_) >= target) {
          make_keys(&list_, parameters_.temperature);
          const ListCut cut = cut_list(target - scan.above, rules_.high_index_first);
          return {cut.set, scan.count_above + cut.kept, scan.above + cut.mass, !band.bounded};
        }
        // The cut is below the band.
        const float lowered = band.lower - kRetryExponents / rule_.factor;
        band.lower =
            retry < kRetries ? larger(class_bottom(lowered, temperature_), floor_) : floor_;
      }
      band.bounded = false;  // or above it
    }
  }

  template <bool kBounded>
  MassScan scan_band(const Band& band) {
    return scan_masses<kBounded>(x_, n_, rule_.max, rule_.factor, rule_.fraction_bits, band.lower,
                                 band.upper, &list_);
  }

  // Logits between which the cut of top-p lies, by a sample.
  Band guess_band() const {
    using namespace tuning;
    alignas(64) float sample[kMaxMassSampleSize], weight[kMaxMassSampleSize];
    int size = kMaxMassSampleSize;
    while (size > kSampleSize && size > n_ / kMassSampleShare) size /= 2;
    sample_row(x_, n_, size, NoEdits{}, sample);
    const F32 m = splat(rule_.max), f = splat(rule_.factor);
    F32 sums = splat(0.0f), squares = splat(0.0f), top = splat(0.0f);
    for (int i = 0; i < size; i += kLanes) {
      const F32 w =
          scaled_weight(load(sample + i), m, f, 0.0f);  // -inf and NaN come to 2^-125: nothing
      store(weight + i, w);
      sums = sums + w;
      squares = squares + w * w;
      top = max(w, top);
    }
    const float sum = reduce_sum(sums);
    const float scale = static_cast<float>(n_) / static_cast<float>(size);
    // A sampled token stands for `scale` tokens: one large weight would overstate the total, so it
    // is left out.
    const float total = larger(scale * (sum - reduce_max(top)), 1.0f);
    const float sigma = 0.5f * __builtin_sqrtf(reduce_sum(squares)) / larger(sum, 0x1p-100f);
    const float tail = 1.0f - parameters_.top_p;
    const float share = larger(tail - kSampleSigmas * sigma, kTailShare * tail);
    Band band{floor_, 0.0f, false};
    band.lower = larger(
        class_bottom(weighted_quantile(sample, weight, size, share * total / scale), temperature_),
        floor_);
    band.lower =
        smaller(band.lower,
                class_bottom(larger(sample_quantile(sample, size, kMinSampledCandidates), floor_),
                             temperature_));
    const float head = parameters_.top_p - kSampleSigmas * sigma;
    if (head > 0.0f) {
      // Below `upper` lies 1 - head of the mass.
      const float upper = weighted_quantile(sample, weight, size, (1.0f - head) * sum);
      int above = 0;
      for (int i = 0; i < size; i += kLanes) above += count(bits(load(sample + i) >= splat(upper)));
      if (above >= kMinSampledAbove && upper > band.lower) {
        band.upper = class_bottom(upper, temperature_);
        band.bounded = band.upper > band.lower;
      }
    }
    return band;
  }

  static float reduce_sum(F32 a) {
    alignas(64) float lane[kLanes];
    store(lane, a);
    float sum = 0.0f;
    for (int i = 0; i < kLanes; ++i) sum += lane[i];
    return sum;
  }

  // A logit, about the largest, below which the sampled weights sum to at most `mass`.
  float weighted_quantile(const float* sample, const float* weight, int size, float mass) const {
    using namespace tuning;
    float low = rule_.max - kQuantileRange / rule_.factor, high = rule_.max;
    if (!(low > -kMaxFloat)) return minus_infinity();
    for (int step = 0; step < kQuantileSteps; ++step) {
      const float middle = low + 0.5f * (high - low);
      const F32 b = splat(middle);
      F32 sums = splat(0.0f), more = splat(0.0f);
      for (int i = 0; i < size; i += 2 * kLanes) {
        sums = sums + select(load(sample + i) >= b, splat(0.0f), load(weight + i));
        more =
            more + select(load(sample + i + kLanes) >= b, splat(0.0f), load(weight + i + kLanes));
      }
      (reduce_sum(sums + more) <= mass ? low : high) = middle;
    }
    return low;
  }

  // ---- the draw and the outputs, from the list of kept tokens

  void finish_list() {
    if (list_.size == 0) return finish_empty();
    int64_t chosen = 0;
    bool nan = false;
    pad(&list_);
    switch (parameters_.noise) {
      case NoiseMode::kNone:
        chosen = choose_largest(list_, parameters_.temperature);
        break;
      case NoiseMode::kByRank:
        make_keys(&list_, parameters_.temperature);
        sort_by_key(&list_);
        [[fallthrough]];
      case NoiseMode::kByToken:
        chosen = choose_by_noise(list_, rule_, params_.q + row_ * params_.q_row_stride,
                                 params_.q_vocab_stride, params_.eps,
                                 parameters_.noise == NoiseMode::kByRank, &nan);
        break;
      case NoiseMode::kInternal:
        chosen = choose_by_seed(list_, rule_, parameters_.seed, parameters_.position,
                                reinterpret_cast<float*>(list_.spare_key));
        break;
    }
    note_nan(nan);
    float logprob = 0.0f;
    if (params_.logprob) {
      make_masses(&list_, rule_);
      logprob = this->logprob(list_.value[chosen], total_mass(list_));
    }
    if (out_) {
      fill(out_, n_, filler());
      for (int64_t i = 0; i < list_.size; ++i) {
        out_[list_.token[i]] = rules_.probabilities
                                   ? list_.value[i]
                                   : tempered(list_.value[i], parameters_.temperature);
      }
    }
    finish(list_.token[chosen], list_.size, logprob);
  }

  const TopKTopPSampleParams& params_;
  const DialectRules& rules_;
  const int64_t n_;
  const T* x_ = nullptr;
  int64_t row_ = 0;
  RowParameters parameters_;
  uint8_t status_ = 0;
  float* out_ = nullptr;
};

// Rows [begin, end) of the batch. `workspace` has top_k_top_p_sample_workspace() bytes, aligned
// to 64.
void top_k_top_p_sample_rows(const TopKTopPSampleParams& params, int64_t begin, int64_t end,
                             void* workspace);

}  // namespace lmdecode::LMD_SIMD::sampling
