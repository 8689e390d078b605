// The stages of a row of a Sampler on a GPU: one block of threads a row. The same results, bit for
// bit, as sampling/sampler_stages.h, the CPU's.
//
// Every stage consists of integer reductions over the remaining tokens, f64 arithmetic on the sums
// (stage_math.h), the same in all threads, and a pass that drops tokens.
#pragma once

#include "common/cuda_intrinsics.cuh"
#include "common/half.h"
#include "sampling/adaptive_p.h"
#include "sampling/row_cluster.cuh"
#include "sampling/row_list.cuh"
#include "sampling/sampler_row_parameters.h"
#include "sampling/stage_math.h"

// The row of a Sampler as a block of threads sees it: the logits as they came, and a copy in which
// they count, which the stages narrow.

namespace lmdecode::sampling::cuda_kernels {

// Four logits that a thread has read; the loop that sees them stands in the code once.
struct FourLogits {
  float first, second, third, fourth;

  __device__ void shift() { first = second, second = third, third = fourth; }
};

// Unedited logits of dtype T, any stride.
template <class T>
struct RawRow {
  const T* x;
  int64_t stride;
  uint32_t vocab;

  __device__ float at(int64_t token) const { return to_float(x[token * stride]); }

  // see(logit, token) for each logit, once, by any thread.
  template <class See>
  __device__ void each(See see) const {
    const RawRow row = *this;  // kept in registers, as see() may write
    const auto load = [&](uint32_t token) {
      return row.at(token < row.vocab ? token : threadIdx.x);
    };
    for (uint32_t token = threadIdx.x; token < row.vocab;) {
      const uint32_t step = blockDim.x;
      FourLogits four{load(token), load(token + step), load(token + 2 * step),
                      load(token + 3 * step)};
#pragma unroll 1
      for (int i = 0; i < 4 && token < row.vocab; ++i, token += step) {
        see(four.first, token);
        four.shift();
      }
    }
  }
};

// After the edits, without NaN, in the block's scratch memory. Tokens that are not left are -inf.
// Passes give each token to the same thread, so that none waits for another between them.
struct EditedRow {
  // [vocab] logits, probabilities where these are adapted; whole vectors of four, aligned to 16.
  float* value;
  uint32_t vocab;
  bool adapts = false;  // adaptive-p makes other logits of the tokens that are left
  float target = 0.0f;
  // Few tokens, among which all are that are left; 0: none are listed.
  const uint32_t* list = nullptr;
  uint32_t listed = 0;

  __device__ bool has(uint32_t token) const { return value[token] > minus_infinity(); }

  // The logit of a token that is left.
  __device__ float at(int64_t token) const { return logit_of(value[token]); }

  // see(logit, token) for each token that is left, once, by any thread.
  template <class See>
  __device__ void each(See see) const {
    const EditedRow row = *this;  // kept in registers, as see() may write
    const auto look = [&](float value_of_token, uint32_t token) {
      if (value_of_token > minus_infinity()) see(row.logit_of(value_of_token), token);
    };
    // Vectors of four, two of them on their way at once; or tokens of the list.
    const bool is_listed = row.list != nullptr;
    const uint32_t count = is_listed ? row.listed : (row.vocab + 3) / 4;
    const uint32_t step = blockDim.x, round = is_listed ? step : 2 * step;
    const auto load = [&](uint32_t i) {
      const float4 four = reinterpret_cast<const float4*>(row.value)[i];
      return FourLogits{four.x, four.y, four.z, four.w};
    };
    for (uint32_t i = threadIdx.x; i < count; i += round) {
      FourLogits four{}, next{};
      if (is_listed) {
        four.first = row.value[row.list[i]];
      } else {
        four = load(i);
        next = load(i + step < count ? i + step : i);
      }
#pragma unroll 1
      for (uint32_t v = i; v < count && v < i + round; v += step, four = next) {
        uint32_t token = is_listed ? row.list[v] : 4 * v;
        const uint32_t size = is_listed ? 1 : row.vocab - token;
#pragma unroll 1
        for (const uint32_t end = token + (size < 4 ? size : 4); token < end; ++token) {
          look(four.first, token);
          four.shift();
        }
      }
    }
  }

  // Drops the tokens for which drops(logit, token).
  template <class Drops>
  __device__ void drop(Drops drops) const {
    each([to = value, &drops](float logit, uint32_t token) {
      if (drops(logit, token)) to[token] = minus_infinity();
    });
  }

  // The same; if few tokens stay, later passes see a list of these alone. Called by all threads of
  // the block.
  template <class Drops>
  __device__ void drop_and_list(RowStorage& storage, Drops drops) {
    if (list != nullptr) return drop(drops);
    constexpr uint32_t kRoom = cuda_tuning::kListedLogits;
    RowList& to = storage.list;
    __syncthreads();  // its size, of a time before, has been read
    if (threadIdx.x == 0) to.size = 0;
    __syncthreads();
    bool has_room = true;
    each([&, values = value](float logit, uint32_t token) {
      if (drops(logit, token)) {
        values[token] = minus_infinity();
      } else if (has_room) {
        const uint32_t place = atomicAdd(&to.size, 1u);
        has_room = place < kRoom;
        if (has_room) to.token[place] = token;
      }
    });
    __syncthreads();
    if (to.size > kRoom) return;
    list = to.token;
    listed = to.size;
  }

 private:
  __device__ float logit_of(float value_of_token) const {
    return adapts ? adapted_logit(value_of_token, target) : value_of_token;
  }
};

enum class Ties { kFirst, kLast, kAll };

class SamplerRowStages {
 protected:
  __device__ SamplerRowStages(RowStorage& storage, int64_t vocab, float* row)
      : cluster_(storage, /*size=*/1), left_{row, static_cast<uint32_t>(vocab)}, n_(vocab) {}

  // A row begins, with all of its tokens. counts: [kSamplerStages] what each stage leaves, or null.
  __device__ void begin_stages(const SamplerRow* state, const SamplerDialectRules& rules,
                               const RowParameters& parameters, int32_t* counts) {
    state_ = state;
    rules_ = rules;
    parameters_ = parameters;
    counts_ = counts;
    left_.adapts = false;
    left_.list = nullptr;
    rule_.fraction_bits = parameters.fraction_bits;
    set_temperature(1.0f);
  }

  // ---- sums over the tokens that are left

  template <class Value, class See>
  __device__ Value sum(See see) {
    Value total{};
    left_.each([&](float logit, uint32_t token) { see(total, logit, token); });
    return cluster_.reduce(total, [](const Value& a, const Value& b) { return a + b; });
  }

  struct Number {
    Word value;
    __device__ Number operator+(const Number& b) const { return {value + b.value}; }
  };

  // The largest of rank_of(logit, token), 0 where no token is left.
  template <class Row, class RankOf>
  __device__ Word largest(const Row& row, RankOf rank_of) {
    Number best{0};
    row.each([&](float logit, uint32_t token) {
      const Word rank = rank_of(logit, token);
      best.value = rank > best.value ? rank : best.value;
    });
    return cluster_.reduce(best, [](Number a, Number b) { return a.value > b.value ? a : b; })
        .value;
  }

  __device__ int64_t count() {
    return static_cast<int64_t>(
        sum<Number>([](Number& total, float, uint32_t) { ++total.value; }).value);
  }

  struct Masses {
    Word mass, surprise;
    __device__ Masses operator+(const Masses& b) const {
      return {mass + b.mass, surprise + b.surprise};
    }
  };

  // Passes copy the members that they read, to have them in registers.
  __device__ Word total_mass() {
    return sum<Number>([rule = rule_](Number& total, float logit, uint32_t) {
             total.value += rule.mass(logit);
           })
        .value;
  }

  __device__ RowWeights weigh() {
    const Masses masses = sum<Masses>([rule = rule_](Masses& total, float logit, uint32_t) {
      total.mass += rule.mass(logit);
      total.surprise += token_surprise(rule, logit);
    });
    return row_weights(masses.mass, masses.surprise, rule_.fraction_bits);
  }

  // ---- order: value descending, then token ascending

  struct KeyOf {
    float temperature;
    __device__ uint32_t operator()(float logit) const {
      return order_key(tempered(logit, temperature));
    }
  };
  __device__ KeyOf keys() const { return {temperature_}; }

  __device__ static Word first_of(uint32_t key, uint32_t token) {
    return static_cast<Word>(key) << 32 | (0xffffffffu - token);
  }

  // The first token in order.
  __device__ uint32_t first_token() {
    const Word first = largest(left_, [key_of = keys()](float logit, uint32_t token) {
      return first_of(key_of(logit), token);
    });
    return 0xffffffffu - static_cast<uint32_t>(first);
  }

  // ---- what changes the row

  __device__ void set_temperature(float temperature) {
    temperature_ = temperature;
    rule_.factor = exponent_factor(temperature);
    rule_.uniform = false;
  }

  // Looks for the largest logit; infinite ones are the support. False where no token is left.
  __device__ bool find_largest() {
    const Word key = largest(left_, [](float logit, uint32_t) { return order_key(logit); });
    if (key == 0) return false;
    rule_.max = value_of_key(static_cast<uint32_t>(key));
    max_ = tempered(rule_.max, temperature_);
    if (max_ == plus_infinity()) {
      rule_.uniform = true;
      drop_below(kPlusInfinityKey);
    }
    return true;
  }

  __device__ void drop_below(uint32_t key) {
    left_.drop([key, key_of = keys()](float logit, uint32_t) { return key_of(logit) < key; });
  }

  // For passes that are expected to keep few tokens.
  template <class Drops>
  __device__ void keep_few(Drops drops) {
    left_.drop_and_list(cluster_.storage(), drops);
  }
  __device__ void keep_few_from(uint32_t key) {
    keep_few([key, key_of = keys()](float logit, uint32_t) { return key_of(logit) < key; });
  }

  // A logit that the division takes to -inf is dropped.
  __device__ bool change_temperature(float temperature) {
    set_temperature(temperature);
    drop_below(kMinusInfinityKey + 1);
    return find_largest();
  }

  __device__ void keep_token(uint32_t kept) {
    keep_few([&](float, uint32_t token) { return token != kept; });
  }

  // The first token in order, or of its ties the last one.
  __device__ void keep_one(bool last) {
    if (!last) return keep_token(first_token());
    keep_token(static_cast<uint32_t>(largest(left_, [key_of = keys()](float logit, uint32_t token) {
      return static_cast<Word>(key_of(logit)) << 32 | token;
    })));
  }

  // The prefix, in descending order of keys, whose count or mass reaches target_of(total); a target
  // of 0 keeps all. Ties at its end: the first or last ones that reach it, or all.
  template <bool kMass, class RankOf, class TargetOf>
  __device__ void keep_prefix(RankOf rank_of, TargetOf target_of, Ties ties) {
    const auto mass_of = [rule = rule_](float logit) -> Word { return rule.mass(logit); };
    const auto key_of_token = [=](float logit, uint32_t, uint32_t* key) {
      *key = rank_of(logit);
      return true;
    };
    const Descent cut = descend_keys<kMass>(cluster_, left_, 32, key_of_token, mass_of, target_of);
    if (!cut.reached) return;
    const Word wanted = cut.target - cut.above;
    uint32_t first = 0, last = 0xffffffffu;
    if (ties != Ties::kAll && (kMass || wanted < cut.at)) {
      const auto place_of = [=, key = cut.key, end = left_.vocab - 1](float logit, uint32_t token,
                                                                      uint32_t* place) {
        if (rank_of(logit) != key) return false;
        *place = ties == Ties::kFirst ? end - token : token;
        return true;
      };
      const Descent tie = descend_keys<kMass>(cluster_, left_, bits_of_number(left_.vocab),
                                              place_of, mass_of, [wanted](Word) { return wanted; });
      (ties == Ties::kFirst ? last : first) =
          ties == Ties::kFirst ? left_.vocab - 1 - tie.key : tie.key;
    }
    keep_few([=, end = cut.key](float logit, uint32_t token) {
      const uint32_t key = rank_of(logit);
      return key < end || (key == end && (token < first || token > last));
    });
  }

  // Drops tokens that cannot be among the k largest, by the threads' largest logits.
  __device__ void drop_below_kth_of_threads(Word k) {
    if (left_.list != nullptr || !tells_a_bound(k, blockDim.x, left_.vocab)) return;
    float best = minus_infinity();
    left_.each([&](float logit, uint32_t) { best = logit > best ? logit : best; });
    const float reached = reached_by<float>(cluster_, best, k);
    if (reached > minus_infinity()) keep_few_from(keys()(reached));
  }

  LMD_OUT_OF_LINE __device__ void keep_top_k(int64_t k, bool keep_ties) {
    const Word wanted = static_cast<Word>(k);
    drop_below_kth_of_threads(wanted);
    keep_prefix</*kMass=*/false>(
        keys(), [=](Word all) { return wanted < all ? wanted : Word{0}; },
        keep_ties ? Ties::kAll : Ties::kFirst);
  }

  __device__ void keep_top_p(float p, bool strict, bool high_index_first) {
    keep_prefix</*kMass=*/true>(
        keys(), [=](Word all) -> Word { return mass_threshold(p, all, strict); },
        high_index_first ? Ties::kLast : Ties::kFirst);
  }

  // Keeps values >= the largest one + offset; if there is none, the first token in order, or all
  // that equal it.
  __device__ void keep_below_max(double offset, bool keep_ties) {
    const uint32_t key = key_below_max(max_, offset);
    if (key <= order_key(max_)) return keep_few_from(key);
    if (!keep_ties) return keep_one(/*last=*/false);
    keep_few_from(order_key(max_));
  }

  // Minus `sigmas` standard deviations of the finite values.
  __device__ double sigma_offset(double sigmas) {
    struct Finite {
      Word lowest, count;  // the order key of minus the lowest value
    } finite{0, 0};
    const auto is_finite = [](float v) { return (bits_of(v) & 0x7fffffffu) < 0x7f800000u; };
    left_.each([&, temperature = temperature_](float logit, uint32_t) {
      const float v = tempered(logit, temperature);
      if (!is_finite(v)) return;
      const Word key = order_key(0.0f - v);
      finite.lowest = key > finite.lowest ? key : finite.lowest;
      ++finite.count;
    });
    finite = cluster_.reduce(finite, [](const Finite& a, const Finite& b) {
      return Finite{a.lowest > b.lowest ? a.lowest : b.lowest, a.count + b.count};
    });
    const float bottom = -value_of_key(static_cast<uint32_t>(finite.lowest));
    const float half_range = 0.5f * max_ - 0.5f * bottom;
    if (!(half_range > 0.0f)) return minus_infinity();
    const float half_max = 0.5f * max_;
    const float shares = shares_of(half_range);
    struct Sums {
      Word sum, squares, carry;  // carry: the high half of the squares
      __device__ Sums operator+(const Sums& b) const {
        const Word low = squares + b.squares;
        return {sum + b.sum, low, carry + b.carry + (low < squares ? 1 : 0)};
      }
    };
    const Sums sums =
        sum<Sums>([=, temperature = temperature_](Sums& total, float logit, uint32_t) {
          const float v = tempered(logit, temperature);
          if (!is_finite(v)) return;
          const Word share = value_share(v, half_max, shares);
          total = total + Sums{share, share * share, 0};
        });
    const ShareSums all{sums.sum, static_cast<Wide>(sums.carry) << 64 | sums.squares};
    return -(sigmas * standard_deviation(shares, all, static_cast<int64_t>(finite.count)));
  }

  // Keeps the prefix with entropy terms of at most `share` of the entropy; if max_tokens is not 0,
  // only of the first max_tokens.
  __device__ void keep_top_h(double share, int64_t max_tokens) {
    if (max_tokens > 0) keep_top_k(max_tokens, /*keep_ties=*/false);
    const RowWeights w = weigh();
    const EntropyTerms terms{w, mass_unit(rule_.fraction_bits)};
    const double most = share * terms(w.mass, w.surprise);
    if (terms(w.mass, w.surprise) <= most) return;
    const KeyOf key_of = keys();
    // The masses of the tokens in_prefix(key, token).
    const auto masses_of = [&](auto in_prefix) {
      return sum<Masses>([=, rule = rule_](Masses& total, float logit, uint32_t token) {
        if (!in_prefix(key_of(logit), token)) return;
        total = total + Masses{rule.mass(logit), token_surprise(rule, logit)};
      });
    };
    const uint32_t high_key =
        static_cast<uint32_t>(largest(left_, [=](float v, uint32_t) { return key_of(v); }));
    const uint32_t low_key =
        ~static_cast<uint32_t>(largest(left_, [=](float v, uint32_t) { return ~key_of(v); }));
    // The terms of keys >= high are at most `most`, those of keys >= low are more.
    uint64_t low = low_key, high = static_cast<uint64_t>(high_key) + 1;
    Masses above{0, 0};  // of keys >= high
    while (high - low > 1) {
      const uint32_t middle = static_cast<uint32_t>((low + high) / 2);
      const Masses from = masses_of([=](uint32_t key, uint32_t) { return key >= middle; });
      if (terms(from.mass, from.surprise) <= most) {
        high = middle;
        above = from;
      } else {
        low = middle;
      }
    }
    // Ties at `low`: tokens below `end` stay; tokens below `over` would exceed `most`.
    const uint32_t cut = static_cast<uint32_t>(low);
    int64_t end = 0, over = n_;
    while (over - end > 1) {
      const int64_t middle = (end + over) / 2;
      const Masses ties =
          masses_of([=](uint32_t key, uint32_t token) { return key == cut && token < middle; });
      if (terms(above.mass + ties.mass, above.surprise + ties.surprise) <= most) {
        end = middle;
      } else {
        over = middle;
      }
    }
    // The first token always stays.
    if (high > high_key) {
      const int64_t first = first_token();
      if (end <= first) end = first + 1;
    }
    keep_few([=](float logit, uint32_t token) {
      const uint32_t key = key_of(logit);
      return key < cut || (key == cut && token >= end);
    });
  }

  // The smallest set of mass >= p, of the tokens with the surprise nearest to the entropy.
  __device__ void keep_typical(double p, bool keep_ties) {
    const RowWeights w = weigh();
    const TypicalDistance distance(rule_, w);
    const Word target = typical_target(p, w.mass);
    keep_prefix</*kMass=*/true>([=](float logit) { return ~order_key(distance.of(logit)); },
                                [=](Word) { return target; },
                                keep_ties ? Ties::kAll : Ties::kFirst);
  }

  // XTC: if two or more tokens reach the threshold, drops all of them but the least likely.
  __device__ void exclude_top_choices(double probability) {
    uint32_t bound = 0;
    if (probability > 0.0) {
      const RowWeights w = row_weights(total_mass(), 0, rule_.fraction_bits);
      bound = key_below_max(max_, epsilon_offset(probability, w));
    }
    struct Choices {
      Word count, last;  // the last in order: complement of the key, token
    } choices{0, 0};
    const KeyOf key_of = keys();
    left_.each([&](float logit, uint32_t token) {
      const uint32_t key = key_of(logit);
      if (key < bound) return;
      ++choices.count;
      const Word last = static_cast<Word>(~key) << 32 | token;
      choices.last = last > choices.last ? last : choices.last;
    });
    choices = cluster_.reduce(choices, [](const Choices& a, const Choices& b) {
      return Choices{a.count + b.count, a.last > b.last ? a.last : b.last};
    });
    if (choices.count < 2) return;
    const uint32_t last = static_cast<uint32_t>(choices.last);
    left_.drop(
        [=](float logit, uint32_t token) { return key_of(logit) >= bound && token != last; });
  }

  // ---- the row's way through them

  // False where no token is left.
  LMD_OUT_OF_LINE __device__ bool run_stages() {
    bool on[kSamplerStages];
    stages_of_row(*state_, parameters_, counts_ != nullptr, on);
    // As on the CPU: a leading temperature and a top-k after it run before the first search for the
    // largest logit, unless the count after each stage is an output.
    int i = 0;
    bool looks_again = false;
    const auto skip_stages = [&] {
      while (i < kSamplerStages && !on[static_cast<int>(rules_.stages[i])]) ++i;
    };
    const auto is_next = [&](SamplerStage stage) {
      return counts_ == nullptr && i < kSamplerStages && rules_.stages[i] == stage;
    };
    skip_stages();
    if (is_next(SamplerStage::kTemperature) && !(state_->numbers.dynamic_temperature_range > 0.0)) {
      set_temperature(parameters_.temperature);
      drop_below(kMinusInfinityKey + 1);
      ++i;
      skip_stages();
    }
    looks_again = is_next(SamplerStage::kTopK);
    if (!find_largest()) return false;
    for (; i < kSamplerStages; ++i) {
      const SamplerStage stage = rules_.stages[i];
      if (!on[static_cast<int>(stage)]) continue;
      bool is_left = run_stage(stage);
      if (looks_again) is_left = find_largest();
      looks_again = false;
      if (counts_ != nullptr) {
        const int64_t left = count();
        if (threadIdx.x == 0) counts_[static_cast<int>(stage)] = static_cast<int32_t>(left);
      }
      if (!is_left) return false;
    }
    return true;
  }

  // False where no token is left.
  __device__ bool run_stage(SamplerStage stage) {
    const SamplerNumbers& numbers = state_->numbers;
    const bool ties = rules_.keep_max_ties;
    switch (stage) {
      case SamplerStage::kTemperature:
        return run_temperature();
      case SamplerStage::kTopK:
        if (parameters_.top_k > 0) keep_top_k(parameters_.top_k, rules_.dialect.keep_top_k_ties);
        return true;
      case SamplerStage::kTopP:
        if (parameters_.top_p_mode == TopPMode::kOneToken) {
          keep_one(rules_.dialect.high_index_first);
        } else {
          keep_top_p(parameters_.top_p, rules_.dialect.strict_top_p,
                     rules_.dialect.high_index_first);
        }
        return true;
      case SamplerStage::kMinP:
        if (parameters_.min_p_mode == MinPMode::kOneToken) {
          keep_one(/*last=*/false);
        } else {
          keep_few_from(min_p_key(parameters_, max_, /*probabilities=*/false));
        }
        return true;
      case SamplerStage::kTopNSigma:
        if (max_ != plus_infinity()) keep_below_max(sigma_offset(numbers.top_n_sigma), ties);
        return true;
      case SamplerStage::kEpsilon:
        keep_below_max(epsilon_offset(numbers.epsilon_cutoff, weigh()), ties);
        return true;
      case SamplerStage::kEta:
        keep_below_max(eta_offset(numbers.eta_cutoff, weigh()), ties);
        return true;
      case SamplerStage::kTopH:
        keep_top_h(numbers.top_h, rules_.top_h_tokens);
        return true;
      case SamplerStage::kTypical:
        keep_typical(numbers.typical_p, rules_.keep_typical_ties);
        return find_largest();  // it may be gone
      case SamplerStage::kXtc:
        if (excludes_top_choices(*state_)) exclude_top_choices(numbers.xtc_threshold);
        return find_largest();
      case SamplerStage::kMirostat:
        keep_below_max(mirostat_offset(state_->mu, weigh()), /*keep_ties=*/false);
        return true;
    }
    return true;
  }

  __device__ bool run_temperature() {
    const SamplerNumbers& numbers = state_->numbers;
    float temperature = parameters_.temperature;
    if (numbers.dynamic_temperature_range > 0.0) {
      const int64_t left = count();
      if (left > 1) {
        temperature = static_cast<float>(dynamic_temperature(numbers, left, weigh().entropy()));
      }
      if (!(temperature > 0.0f)) {
        keep_one(/*last=*/false);
        return true;
      }
    }
    return change_temperature(temperature);
  }

  RowCluster cluster_;
  EditedRow left_;
  const int64_t n_;
  const SamplerRow* state_ = nullptr;
  SamplerDialectRules rules_{};
  RowParameters parameters_;
  int32_t* counts_ = nullptr;
  TokenWeight rule_;
  float temperature_ = 1.0f;
  float max_ = 0.0f;  // the largest value after the temperature
};

}  // namespace lmdecode::sampling::cuda_kernels
