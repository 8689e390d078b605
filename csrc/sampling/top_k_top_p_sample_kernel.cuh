// top_k_top_p_sample on a GPU: one thread block cluster a row. docs/reference/sampling.md has the
// semantics, sampling/top_k_top_p_sample_cpu_kernel.h the same on the CPU: results are equal bit
// for bit.
//
// The row is read once into the shared memory of the cluster (row_slice.cuh). The kept part is one
// interval of logits and, among the ties at its lower end, an interval of tokens (KeptSet); each
// stage narrows it by a radix descent over counts or masses (radix_descent.cuh) and nothing is
// sorted or moved.
#pragma once

#include "common/mass_threshold.h"
#include "sampling/rank_noise.cuh"
#include "sampling/row_list.cuh"
#include "sampling/row_parameters.h"
#include "sampling/seed_draw.cuh"

namespace lmdecode::sampling::cuda_kernels {

template <class T>
class CudaRowSampler {
 public:
  __device__ CudaRowSampler(const TopKTopPSampleParams& params, const SamplingLaunchPlan& plan,
                            RowStorage& storage)
      : params_(params),
        launch_(plan),
        rules_(dialect_rules(params.dialect)),
        vocab_(static_cast<uint32_t>(params.vocab)),
        cluster_(storage, plan.cluster_size) {}

  __device__ __forceinline__ void run(int64_t row) {
    row_ = row;
    RowSlice<T> slice(static_cast<const T*>(params_.logits) + row * params_.logits_row_stride,
                      params_.logits_vocab_stride, vocab_, cluster_.rank(), launch_,
                      reinterpret_cast<unsigned char*>(&cluster_.storage() + 1));
    const bool has_nan = load(slice);
    // Not before: the loop that loads needs the registers.
    parameters_ = parameters_of_row(params_, rules_, row);
    status_ = parameters_.status | (has_nan ? kStatusNan : 0);
    if (parameters_.greedy) {
      greedy(slice);
    } else {
      filtered(slice);
    }
    // Nobody starts the next row, or leaves, while others still read this block's memory.
    cluster_.sync();
  }

 private:
  struct One {
    Word value;
  };

  __device__ Word max_of_cluster(Word value) {
    const auto larger = [](One a, One b) { return a.value > b.value ? a : b; };
    return cluster_.reduce(One{value}, larger).value;
  }

  // Whether a logit is NaN.
  __device__ bool load(RowSlice<T>& slice) {
    struct Scan {
      Word max_key, has_nan;
    };
    float best = minus_infinity();
    bool has_nan = false;
    slice.load([&](float logit) {
      best = logit > best ? logit : best;
      has_nan |= logit != logit;
    });
    const Scan scan =
        cluster_.reduce(Scan{order_key(best), has_nan}, [](const Scan& a, const Scan& b) {
          return Scan{a.max_key > b.max_key ? a.max_key : b.max_key, a.has_nan | b.has_nan};
        });
    best_ = best;
    max_ = value_of_key(static_cast<uint32_t>(scan.max_key));
    return scan.has_nan != 0;
  }

  // ---- outputs

  __device__ float filler() const { return rules_.probabilities ? 0.0f : minus_infinity(); }

  __device__ void finish(uint32_t index, Word kept, float logprob) {
    if (cluster_.rank() != 0 || threadIdx.x != 0) return;
    params_.index[row_] = index;
    params_.kept_count[row_] = static_cast<int32_t>(kept);
    if (params_.logprob) params_.logprob[row_] = logprob;
    params_.status[row_] = status_;
  }

  __device__ void finish_empty(const RowSlice<T>& slice) {
    status_ |= kStatusEmpty;
    write(slice, [&](float, uint32_t) { return filler(); });
    finish(0, 0, minus_infinity());
  }

  __device__ void greedy(const RowSlice<T>& slice) {
    if (!(max_ > minus_infinity())) return finish_empty(slice);
    const uint32_t index = first_token(slice, kept_from(max_));
    write(slice, [&](float logit, uint32_t token) { return token == index ? logit : filler(); });
    finish(index, 1, 0.0f);
  }

  // value(logit, token) of each token to kept_logits.
  template <class ValueOf>
  __device__ void write(const RowSlice<T>& slice, ValueOf value) {
    if (params_.kept_logits == nullptr) return;
    slice.write(params_.kept_logits + row_ * params_.vocab, filler(), value);
  }

  // ---- small searches

  // The first token of a set; 0 where it is empty.
  __device__ uint32_t first_token(const RowSlice<T>& slice, const KeptSet& set) {
    uint32_t complement = 0;
    slice.each([&](float logit, uint32_t token) {
      if (set.contains(logit, token) && ~token > complement) complement = ~token;
    });
    complement = static_cast<uint32_t>(max_of_cluster(complement));
    return complement == 0 ? 0 : ~complement;
  }

  __device__ uint32_t last_token(const RowSlice<T>& slice, const KeptSet& set) {
    Word best = 0;
    slice.one_by_one().each([&](float logit, uint32_t token) {
      if (set.contains(logit, token) && token > best) best = token;
    });
    return static_cast<uint32_t>(max_of_cluster(best));
  }

  __device__ ValueClass class_of(float logit) const {
    return cuda_kernels::class_of(logit, parameters_.temperature);
  }

  // Cuts the set off below `value_class`; within this class only tokens [first, last] stay.
  __device__ void cut_at(const ValueClass& value_class, uint32_t first, uint32_t last) {
    if (value_class.lowest <= set_.lowest) {  // ties were cut before: both cuts hold
      first = first > set_.first_tie ? first : set_.first_tie;
      last = last < set_.last_tie ? last : set_.last_tie;
    }
    set_ = {value_class.lowest, value_class.above, first, last};
  }

  __device__ TokenRange ties_of(const ValueClass& value_class) const {
    TokenRange ties{set_};
    if (value_class.lowest > set_.lowest) ties.set = kept_from(value_class.lowest);
    ties.below = value_class.above;
    return ties;
  }

  // ---- the stages

  __device__ __forceinline__ void filtered(RowSlice<T>& slice) {
    const float floor = find_lowest_logit(kMinusInfinityKey + 1, parameters_.temperature);
    if (!(max_ >= floor)) return finish_empty(slice);
    const float largest = tempered(max_, parameters_.temperature);
    weight_ = {max_, parameters_.factor, parameters_.fraction_bits, largest == plus_infinity(),
               rules_.probabilities};
    // Infinite logits are the support.
    set_ = kept_from(weight_.uniform ? find_lowest_logit(kPlusInfinityKey, parameters_.temperature)
                                     : floor);

    if (parameters_.top_k > 0) {
      keep_largest(cluster_, slice, vocab_, best_, static_cast<Word>(parameters_.top_k),
                   launch_.list_room, [this](float logit) { return class_of(logit).lowest; });
    }
    const bool min_p_first = rules_.min_p_first && parameters_.min_p_mode != MinPMode::kOff;
    if (min_p_first) apply_min_p(slice, largest, floor);
    if (parameters_.top_k > 0) apply_top_k(slice);
    if (parameters_.top_p_mode == TopPMode::kOneToken) keep_one(slice, rules_.high_index_first);
    if (parameters_.top_p_mode == TopPMode::kMass) apply_top_p(slice);
    if (parameters_.min_p_mode != MinPMode::kOff && !min_p_first)
      apply_min_p(slice, largest, floor);
    draw(slice);
  }

  __device__ void apply_top_k(const RowSlice<T>& slice) {
    const Word k = static_cast<Word>(parameters_.top_k);
    // A list of k tokens is what is wanted.
    const Descent cut = descend<false, Order::kValue>(
        cluster_, slice, vocab_, TokenRange{set_}, weight_,
        [k](Word candidates) { return k < candidates ? k : Word{0}; });
    if (!cut.reached) return;
    const ValueClass ties = class_of(value_of_short_key<T>(cut.key));
    if (rules_.keep_top_k_ties) return cut_at(ties, 0, 0xffffffffu);
    Word greater = cut.above, equal = cut.at;
    if (parameters_.temperature != 1.0f) {  // other logits may come to the same value
      const Amounts amounts = amounts_of(slice, ties, /*masses=*/false);
      greater = amounts.greater;
      equal = amounts.count;
    }
    const Word wanted = k - greater;
    uint32_t last = 0xffffffffu;
    if (wanted < equal) {
      const Descent tie = descend<false, Order::kLowTokenFirst>(
          cluster_, slice, vocab_, ties_of(ties), weight_, [wanted](Word) { return wanted; });
      last = vocab_ - 1 - tie.key;
    }
    cut_at(ties, 0, last);
    // The largest logit may have been among the ties that lost.
    if (greater == 0 && parameters_.temperature != 1.0f) {
      float best = minus_infinity();
      slice.each([&](float logit, uint32_t token) {
        if (set_.contains(logit, token) && logit > best) best = logit;
      });
      weight_.max = value_of_key(static_cast<uint32_t>(max_of_cluster(order_key(best))));
    }
  }

  // The last token that top-p keeps is looked for in its bin of masses, where this has few tokens.
  __device__ void apply_top_p(RowSlice<T>& slice) {
    Descent bin;
    bool in_bin = false;
    if (!slice.has_list() && !weight_.uniform && launch_.slice <= kMostBinned) {
      bin = find_mass_bin(cluster_, slice, set_, weight_,
                          [this](Word total) { return top_p_target(total); });
      if (!bin.reached) return;
      keep_mass_bin(cluster_, slice, set_, weight_, bin.key, launch_.list_room);
      in_bin = slice.has_list();
    }
    while (!cut_top_p(slice, in_bin, bin)) {
      slice.keep_all();
      in_bin = false;
    }
    if (in_bin) slice.keep_all();
  }

  __device__ Word top_p_target(Word total) const {
    const uint64_t whole =
        rules_.probabilities ? uint64_t{1} << parameters_.fraction_bits : uint64_t{total};
    return mass_threshold(parameters_.top_p, whole, rules_.strict_top_p);
  }

  __device__ bool is_in_bin(float logit, uint32_t bin) const {
    return mass_bin(weight_, logit < weight_.max ? logit : weight_.max) == bin;
  }

  // Cuts the set where the mass reaches the target. in_bin: the slices have the tokens of this bin
  // alone; then false, and nothing is cut, where the class of the last token may have others.
  __device__ __forceinline__ bool cut_top_p(const RowSlice<T>& slice, bool in_bin,
                                            const Descent& bin) {
    const auto target = [&](Word total) {
      return in_bin ? bin.target - bin.above : top_p_target(total);
    };
    const Descent cut =
        descend<true, Order::kValue>(cluster_, slice, vocab_, TokenRange{set_}, weight_, target);
    if (!cut.reached) return true;
    const float value = value_of_short_key<T>(cut.key);
    const ValueClass ties = class_of(value);
    if (in_bin && !(is_in_bin(ties.lowest, bin.key) &&
                    is_in_bin(value_of_key(order_key(ties.above) - 1), bin.key))) {
      return false;
    }
    Word greater = cut.above, mass = cut.at, count = 0;
    if (parameters_.temperature == 1.0f) {
      count = mass / weight_.mass(value);
    } else {
      const Amounts amounts = amounts_of(slice, ties, /*masses=*/true);
      greater = amounts.greater;
      count = amounts.count;
    }
    uint32_t first = 0, last = 0xffffffffu;
    if (count > 1) {
      const Word wanted = cut.target - greater;
      const auto wanted_mass = [wanted](Word) { return wanted; };
      if (rules_.high_index_first) {
        first = descend<true, Order::kHighTokenFirst>(cluster_, slice, vocab_, ties_of(ties),
                                                      weight_, wanted_mass)
                    .key;
      } else {
        last = vocab_ - 1 -
               descend<true, Order::kLowTokenFirst>(cluster_, slice, vocab_, ties_of(ties), weight_,
                                                    wanted_mass)
                   .key;
      }
    }
    cut_at(ties, first, last);
    return true;
  }

  // The count or mass of the set above a class of values, and the number of its tokens in the
  // class.
  struct Amounts {
    Word greater, count;
  };

  __device__ Amounts amounts_of(const RowSlice<T>& slice, const ValueClass& ties, bool masses) {
    Amounts amounts{0, 0};
    slice.each([&](float logit, uint32_t token) {
      if (!(logit >= ties.lowest) || !set_.contains(logit, token)) return;
      if (logit >= ties.above) {
        amounts.greater += masses ? weight_.mass(logit) : 1;
      } else {
        ++amounts.count;
      }
    });
    return cluster_.reduce(amounts, [](const Amounts& a, const Amounts& b) {
      return Amounts{a.greater + b.greater, a.count + b.count};
    });
  }

  // The first or last of the largest tokens.
  __device__ void keep_one(const RowSlice<T>& slice, bool last) {
    const ValueClass largest = class_of(max_);
    const KeptSet set = ties_of(largest).set;
    const uint32_t token = last ? last_token(slice, set) : first_token(slice, set);
    cut_at(largest, token, token);
  }

  __device__ void apply_min_p(const RowSlice<T>& slice, float largest, float floor) {
    if (parameters_.min_p_mode == MinPMode::kOneToken) return keep_one(slice, /*last=*/false);
    const uint32_t key = min_p_key(parameters_, largest, rules_.probabilities);
    const float lowest = find_lowest_logit(key, parameters_.temperature);
    if (lowest > floor && lowest > set_.lowest) set_ = kept_from(lowest);
  }

  // ---- the draw, from the kept tokens

  struct Draw {
    Word count, mass;
    Word best;  // by mode: complement of the token, (order key of the score, complement), lower
                // bound
    Word has_nan;
  };

  __device__ static Word with_token(float score, uint32_t token) {
    return static_cast<Word>(order_key(score)) << 32 | (0xffffffffu - token);
  }

  __device__ void draw(const RowSlice<T>& slice) {
    const float top = parameters_.noise == NoiseMode::kNone ? class_of(max_).lowest : 0.0f;
    const float* q = params_.q ? params_.q + row_ * params_.q_row_stride : nullptr;
    const bool masses = params_.logprob != nullptr;
    Draw all{0, 0, 0, 0};
    SeedCandidate mine;
    if (parameters_.noise == NoiseMode::kInternal) {
      slice.each_quad([&](const float (&logits)[4], uint32_t first) {
        bool any = false, is_kept[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) any |= is_kept[i] = set_.contains(logits[i], first + i);
        if (!any) return;
        const PhiloxBlock words = noise_words(parameters_.seed, parameters_.position, first / 4, 0);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          if (!is_kept[i]) continue;
          ++all.count;
          if (masses) all.mass += weight_.mass(logits[i]);
          mine.see(weight_.weight(logits[i]), words.word[i], first + i);
        }
      });
      all.best = mine.bound();
    } else {
      slice.each([&](float logit, uint32_t token) {
        if (!set_.contains(logit, token)) return;
        ++all.count;
        if (masses) all.mass += weight_.mass(logit);
        Word candidate = 0;
        if (parameters_.noise == NoiseMode::kNone) {
          if (logit >= top) candidate = 0xffffffffu - token;
        } else if (parameters_.noise == NoiseMode::kByToken) {
          const float noise = q[static_cast<int64_t>(token) * params_.q_vocab_stride];
          all.has_nan |= noise != noise;
          candidate = with_token(external_score(weight_.weight(logit), noise, params_.eps), token);
        }
        all.best = candidate > all.best ? candidate : all.best;
      });
    }
    all = cluster_.reduce(all, [](const Draw& a, const Draw& b) {
      return Draw{a.count + b.count, a.mass + b.mass, a.best > b.best ? a.best : b.best,
                  a.has_nan | b.has_nan};
    });

    uint32_t index = 0xffffffffu - static_cast<uint32_t>(all.best);
    if (parameters_.noise == NoiseMode::kInternal) {
      const uint32_t complement = draw_by_seed(
          cluster_, slice.one_by_one(),
          [&](float logit, uint32_t token) { return set_.contains(logit, token); }, weight_,
          parameters_.seed, parameters_.position, mine, static_cast<uint32_t>(all.best));
      index = complement == 0 ? first_token(slice, set_) : 0xffffffffu - complement;
    } else if (parameters_.noise == NoiseMode::kByRank) {
      const RankDraw ranked = draw_by_rank(cluster_, slice, vocab_, set_, all.count, weight_,
                                           parameters_.temperature, q, params_.q_vocab_stride,
                                           params_.eps, static_cast<uint32_t>(launch_.rank_chunk));
      index = static_cast<uint32_t>(ranked.token);
      all.has_nan |= ranked.has_nan;
    }
    if (all.count == 0) index = 0;
    if (all.has_nan) status_ |= kStatusNan;

    const float off = filler();
    write(slice, [&](float logit, uint32_t token) {
      if (!set_.contains(logit, token)) return off;
      return rules_.probabilities ? logit : tempered(logit, parameters_.temperature);
    });
    finish(index, all.count,
           masses ? logprob(weight_.weight(slice.of_row(index)), all.mass) : 0.0f);
  }

  __device__ float logprob(float weight_of_chosen, Word kept_mass) const {
    return log_probability(weight_of_chosen, kept_mass, parameters_.fraction_bits);
  }

  const TopKTopPSampleParams& params_;
  const SamplingLaunchPlan& launch_;
  const DialectRules rules_;
  const uint32_t vocab_;
  RowCluster cluster_;
  int64_t row_ = 0;
  RowParameters parameters_;
  uint8_t status_ = 0;
  float max_ = 0.0f;   // the largest logit of the row
  float best_ = 0.0f;  // the largest that this thread has read
  KeptSet set_{};
  TokenWeight weight_;
};

template <class T>
__global__ void __launch_bounds__(cuda_tuning::kMaxThreads)
    top_k_top_p_sample_kernel(const LMD_KERNEL_PARAM TopKTopPSampleParams params,
                              const LMD_KERNEL_PARAM SamplingLaunchPlan plan) {
  RowStorage& storage = cuda::shared_storage<RowStorage>();
  CudaRowSampler<T> sampler(params, plan, storage);
  for (int64_t row = blockIdx.x / plan.cluster_size; row < params.batch; row += plan.clusters) {
    sampler.run(row);
  }
}

}  // namespace lmdecode::sampling::cuda_kernels
