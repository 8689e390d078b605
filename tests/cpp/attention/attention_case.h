// Random attention calls on memory of exactly its size, and their results in double precision.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "attention/sliding_window_attention.h"
#include "check.h"

namespace lmdecode::attention::test {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Numbers of a dtype, and the same as doubles.
class Numbers {
 public:
  Numbers(DType dtype, int64_t size) : dtype_(dtype), values_(static_cast<size_t>(size)) {
    bytes_ = std::malloc(static_cast<size_t>(size) * element_bytes());
  }
  ~Numbers() { std::free(bytes_); }
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;

  template <class Random>
  void fill(Random& random, double spread) {
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < values_.size(); ++i) set(i, normal(random) * static_cast<float>(spread));
  }
  // Element 0 of each row of `size` becomes value(row).
  template <class Value>
  void set_first(int64_t size, const Value& value) {
    const size_t step = static_cast<size_t>(size);
    for (size_t row = 0; row < values_.size() / step; ++row) set(row * step, value(row));
  }
  void set_all(float value) {
    for (size_t i = 0; i < values_.size(); ++i) set(i, value);
  }
  void* data() const { return bytes_; }
  std::vector<char> copy() const {
    const char* const first = static_cast<const char*>(bytes_);
    return {first, first + values_.size() * element_bytes()};
  }
  const std::vector<double>& values() const { return values_; }
  double at(int64_t i) const {
    const size_t place = static_cast<size_t>(i);
    switch (dtype_) {
      case DType::kFloat32:
        return static_cast<double>(static_cast<const float*>(bytes_)[place]);
      case DType::kFloat16:
        return static_cast<double>(to_float(static_cast<const Half*>(bytes_)[place]));
      default:
        return static_cast<double>(to_float(static_cast<const BFloat16*>(bytes_)[place]));
    }
  }

 private:
  size_t element_bytes() const { return dtype_ == DType::kFloat32 ? 4 : 2; }
  void set(size_t i, float value) {
    // Truncated to bfloat16 all three hold the number exactly; f16 in its normal range.
    uint32_t bits = 0;
    std::memcpy(&bits, &value, 4);
    bits &= 0xffff0000u;
    if (dtype_ == DType::kFloat16) {
      if (std::fabs(value) < 1e-4f) bits = 0;
      const uint16_t half =
          bits == 0 ? 0
                    : static_cast<uint16_t>((bits >> 16 & 0x8000u) |
                                            (((bits & 0x7fffffffu) - 0x38000000u) >> 13));
      static_cast<uint16_t*>(bytes_)[i] = half;
    } else if (dtype_ == DType::kBFloat16) {
      static_cast<uint16_t*>(bytes_)[i] = static_cast<uint16_t>(bits >> 16);
    } else {
      std::memcpy(static_cast<float*>(bytes_) + i, &bits, 4);
    }
    std::memcpy(&value, &bits, 4);
    values_[i] = static_cast<double>(value);
  }

  DType dtype_;
  void* bytes_ = nullptr;
  std::vector<double> values_;
};

// A call with its tensors.
struct Case {
  std::mt19937_64 random;
  SlidingWindowAttentionParams p;
  std::unique_ptr<Numbers> q, k, v, out;
  std::vector<float> lse, sinks, slopes;
  std::vector<int64_t> lengths, positions;
  std::unique_ptr<bool[]> mask, padding;

  explicit Case(uint64_t seed) : random(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); }
  bool chance(double p) { return std::uniform_real_distribution<double>()(random) < p; }
  int64_t one_of(std::initializer_list<int64_t> values) {
    return values.begin()[below(static_cast<int64_t>(values.size()))];
  }

  double score(int64_t sequence, int64_t head, int64_t token, int64_t key) const {
    const int64_t kv_head = head / p.group();
    double sum = 0.0;
    for (int64_t i = 0; i < p.head_size; ++i) {
      sum += q->values()[static_cast<size_t>(
                 ((sequence * p.q_heads + head) * p.q_len + token) * p.head_size + i)] *
             k->values()[static_cast<size_t>(
                 ((sequence * p.kv_heads + kv_head) * p.kv_len + key) * p.head_size + i)];
    }
    sum *= static_cast<double>(p.scale);
    const double cap = static_cast<double>(p.softcap);
    if (cap != 0.0) sum = cap * std::tanh(sum / cap);
    const int64_t distance = p.position(sequence, token) - key;
    if (p.alibi_slopes != nullptr) {
      sum -= static_cast<double>(p.alibi_slopes[head]) * std::fabs(static_cast<double>(distance));
    }
    const KeyRange seen = p.keys_seen(sequence, token);
    bool visible = key >= seen.begin && key < seen.end;
    if (mask) {
      visible &= mask[(static_cast<size_t>(sequence) * static_cast<size_t>(p.q_len) +
                       static_cast<size_t>(token)) *
                          static_cast<size_t>(p.kv_len) +
                      static_cast<size_t>(key)] == p.mask_true_is_visible;
    }
    if (padding) visible &= padding[static_cast<size_t>(sequence * p.kv_len + key)];
    return visible ? sum : -kInfinity;
  }

  // Compares what was written with the definition.
  void check(double tolerance) const {
    for (int64_t s = 0; s < p.sequences; ++s) {
      for (int64_t h = 0; h < p.q_heads; ++h) {
        for (int64_t t = 0; t < p.q_len; ++t) check_row(s, h, t, tolerance);
      }
    }
  }

  void check_row(int64_t s, int64_t h, int64_t t, double tolerance) const {
    double top = sinks.empty() ? -kInfinity : static_cast<double>(p.sinks[h]);
    std::vector<double> scores;
    for (int64_t key = 0; key < p.keys_of(s); ++key) {
      scores.push_back(score(s, h, t, key));
      top = std::max(top, scores.back());
    }
    double sum = 0.0;
    if (top > -kInfinity && !sinks.empty()) {
      sum = std::exp(static_cast<double>(p.sinks[h]) - top);
    }
    std::vector<double> want(static_cast<size_t>(p.value_size));
    for (size_t key = 0; key < scores.size(); ++key) {
      const double weight = scores[key] > -kInfinity ? std::exp(scores[key] - top) : 0.0;
      sum += weight;
      const int64_t row = (s * p.kv_heads + h / p.group()) * p.kv_len + static_cast<int64_t>(key);
      for (int64_t i = 0; i < p.value_size; ++i) {
        want[static_cast<size_t>(i)] +=
            weight * v->values()[static_cast<size_t>(row * p.value_size + i)];
      }
    }
    const int64_t row = (s * p.q_heads + h) * p.q_len + t;
    for (int64_t i = 0; i < p.value_size; ++i) {
      const double expected = sum == 0.0 ? 0.0 : want[static_cast<size_t>(i)] / sum;
      const double got = out->at(row * p.value_size + i);
      CHECK(std::fabs(got - expected) <= tolerance * (1.0 + std::fabs(expected)));
    }
    const double expected = sum == 0.0 ? -kInfinity : top + std::log(sum);
    const double got = static_cast<double>(lse[static_cast<size_t>(row)]);
    CHECK(got == expected || std::fabs(got - expected) <= 1e-5 * (1.0 + std::fabs(expected)));
  }
};

inline double tolerance_of(DType dtype) {
  return dtype == DType::kFloat32 ? 2e-5 : dtype == DType::kFloat16 ? 2e-3 : 2e-2;
}

// Sizes around those of groups, panels and steps; every option.
// kv_len: of the cache; size: of heads and values; 0: a random one.
inline std::unique_ptr<Case> random_case(uint64_t seed, DType dtype, bool decode,
                                         int64_t kv_len = 0, int64_t size = 0) {
  auto c = std::make_unique<Case>(seed);
  SlidingWindowAttentionParams& p = c->p;
  p.dtype = dtype;
  p.sequences = 1 + c->below(2);
  p.kv_heads = 1 + c->below(2);
  p.q_heads = p.kv_heads * c->one_of({1, 2, 4, 5});
  p.head_size = c->one_of({1, 7, 16, 32, 33, 64});
  p.value_size = c->one_of({1, 16, 24, 32, 64, 70});
  p.q_len = decode ? c->one_of({1, 1, 2, 5}) : c->one_of({1, 3, 13, 40});
  p.kv_len = c->one_of({1, 15, 16, 17, 63, 64, 65, 130, decode ? 600 : 270});
  if (kv_len > 0) p.kv_len = kv_len;
  if (size > 0) p.head_size = p.value_size = size;
  const auto tensor = [&](int64_t heads, int64_t tokens, int64_t size, double spread,
                          AttentionStrides* s) {
    *s = {heads * tokens * size, tokens * size, size, 1};
    auto numbers = std::make_unique<Numbers>(dtype, p.sequences * heads * tokens * size);
    numbers->fill(c->random, spread);
    return numbers;
  };
  c->q = tensor(p.q_heads, p.q_len, p.head_size, 1.0, &p.q_strides);
  c->k = tensor(p.kv_heads, p.kv_len, p.head_size, 1.0, &p.k_strides);
  c->v = tensor(p.kv_heads, p.kv_len, p.value_size, 1.0, &p.v_strides);
  c->out = tensor(p.q_heads, p.q_len, p.value_size, 9.0, &p.out_strides);
  p.q = c->q->data();
  p.k = c->k->data();
  p.v = c->v->data();
  p.out = c->out->data();
  c->lse.assign(static_cast<size_t>(p.sequences * p.q_heads * p.q_len), 7.0f);
  p.lse = c->lse.data();
  p.lse_strides = {p.q_heads * p.q_len, p.q_len, 1, 0};
  p.scale = c->chance(0.2) ? -0.3f : c->chance(0.1) ? 0.0f : 0.5f;
  if (c->chance(0.6)) p.window = c->one_of({1, 2, 16, 50, 64, 200});
  if (c->chance(0.3)) p.window_right = c->one_of({kUnlimited, 1, 9});
  if (c->chance(0.2)) p.softcap = 4.0f;
  std::normal_distribution<float> normal;
  if (c->chance(0.3)) {
    for (int64_t h = 0; h < p.q_heads; ++h) c->sinks.push_back(normal(c->random));
    p.sinks = c->sinks.data();
  }
  if (c->chance(0.2)) {
    for (int64_t h = 0; h < p.q_heads; ++h) c->slopes.push_back(0.1f * static_cast<float>(h));
    p.alibi_slopes = c->slopes.data();
  }
  if (c->chance(0.3)) {
    for (int64_t s = 0; s < p.sequences; ++s) c->lengths.push_back(c->below(p.kv_len + 1));
    p.kv_lengths = c->lengths.data();
  }
  if (c->chance(0.2)) {
    for (int64_t i = 0; i < p.sequences * p.q_len; ++i) {
      c->positions.push_back(c->below(p.kv_len + 8) - 4);
    }
    p.q_positions = c->positions.data();
    p.position_strides = {p.q_len, 0, 1, 0};
  }
  const auto bits = [&](int64_t size) {
    auto flags = std::make_unique<bool[]>(static_cast<size_t>(size));
    for (int64_t i = 0; i < size; ++i) flags[static_cast<size_t>(i)] = c->chance(0.5);
    return flags;
  };
  if (!decode && c->chance(0.3)) {
    c->mask = bits(p.sequences * p.q_len * p.kv_len);
    p.mask = c->mask.get();
    p.mask_type = MaskType::kBool;
    p.mask_true_is_visible = c->chance(0.5);
    p.mask_strides = {p.q_len * p.kv_len, 0, p.kv_len, 1};
  }
  if (c->chance(0.2)) {
    c->padding = bits(p.sequences * p.kv_len);
    p.key_padding = c->padding.get();
    p.key_padding_strides = {p.kv_len, 0, 1, 0};
  }
  return c;
}

// Scores whose rounding is larger than the range of the exponents; equal ones share the weight.
inline std::unique_ptr<Case> case_of_large_scores(DType dtype, bool decode) {
  auto c = random_case(2, dtype, decode, 300, 32);
  c->p.scale = 1e11f;
  c->p.softcap = 0.0f;
  c->p.alibi_slopes = nullptr;
  c->sinks.clear();
  c->p.sinks = nullptr;
  c->q->set_all(1.0f);
  c->k->set_all(0.0f);
  c->k->set_first(32, [](size_t row) { return row % 2 == 0 ? 2.3f : 1.7f; });
  return c;
}

}  // namespace lmdecode::attention::test
