// Rows of a sampler with random parameters, in memory of exactly their size.
#pragma once

#include <cmath>

#include "sample_case.h"
#include "sampling/sampler_state.h"

namespace lmdecode::sampling::test {

// ---- rows of random parameters

struct RowCase {
  SamplerIntegers integers{};
  SamplerNumbers numbers{};
  std::vector<int32_t> rules;
  std::vector<int64_t> prompt;
};

constexpr int64_t kMostRules = 60;

inline std::vector<int32_t> random_rules(Random& random, int64_t vocab) {
  const auto token = [&] { return static_cast<int32_t>(random.below(vocab)); };
  const auto bias = [&] {
    const float value =
        random.chance(0.3) ? minus_infinity() : static_cast<float>(random.normal() * 3.0);
    return static_cast<int32_t>(bits_of(value));
  };
  std::vector<int32_t> rules;
  for (int i = 0; i < 5; ++i) rules.push_back(static_cast<int32_t>(random.below(4)));
  const std::vector<int32_t> sizes = rules;
  for (int32_t i = 0; i < sizes[0]; ++i) rules.insert(rules.end(), {token(), bias()});
  for (int32_t i = 0; i < sizes[1]; ++i) rules.push_back(token());
  for (int32_t i = 0; i < sizes[2]; ++i) {
    rules.insert(rules.end(), {static_cast<int32_t>(random.below(20)), token()});
  }
  for (int32_t i = 0; i < sizes[3]; ++i) rules.push_back(token());
  for (int32_t i = 0; i < sizes[4]; ++i) {
    const int32_t length = 2 + static_cast<int32_t>(random.below(3));
    rules.push_back(length);
    for (int32_t j = 0; j < length; ++j) rules.push_back(token());
    rules.push_back(bias());
  }
  return rules;
}

inline RowCase random_row(Random& random, int64_t vocab) {
  RowCase c;
  c.integers.dialect = random.below(kSamplerDialectCount);
  c.integers.seed = random.chance(0.15) ? -1 : random.below(int64_t{1} << 62);
  c.integers.top_k = random.chance(0.5) ? 0 : 1 + random.below(vocab + 3);
  c.integers.no_repeat_ngram_size = random.chance(0.7) ? 0 : 1 + random.below(4);
  c.integers.dry_allowed_length = random.below(4);
  c.integers.min_tokens = random.chance(0.7) ? 0 : random.below(30);
  const auto chosen = [&](double chance, double off, std::initializer_list<double> values) {
    // As Python rounds them.
    return static_cast<double>(
        static_cast<float>(random.chance(chance) ? random.any_of(values) : off));
  };
  SamplerNumbers& n = c.numbers;
  n.temperature = chosen(0.5, 1.0, {0.0, 0.7, 1.5, 1e-6, 1e-44, 1e30, 1.0 / 0.0});
  n.top_p = chosen(0.4, 1.0, {0.0, 0.3, 0.9, 0.999, -1.0});
  n.min_p = chosen(0.3, 0.0, {0.01, 0.5, 1.0, 1.5});
  n.typical_p = chosen(0.2, 1.0, {0.0, 0.2, 0.95});
  n.epsilon_cutoff = chosen(0.2, 0.0, {1e-3, 0.3, 1e-30});
  n.eta_cutoff = chosen(0.2, 0.0, {1e-3, 0.3});
  n.top_n_sigma = chosen(0.2, 0.0, {0.5, 2.0, -1.0, 1.0 / 0.0});
  n.top_h = chosen(0.2, 1.0, {0.0, 0.3, 0.8});
  n.xtc_probability = chosen(0.2, 0.0, {0.5, 1.0});
  n.xtc_threshold = chosen(0.5, 0.1, {0.0, 0.01, 0.6});
  n.repetition_penalty = chosen(0.4, 1.0, {1.3, 0.5, 1e30, 1e-38});
  n.presence_penalty = chosen(0.3, 0.0, {0.5, -2.0, 3e38});
  n.frequency_penalty = chosen(0.3, 0.0, {0.5, -2.0, -3e38});
  n.dry_multiplier = chosen(0.3, 0.0, {0.8, 1e30});
  n.dry_base = chosen(0.5, 1.75, {0.5, 1.0, 1e30});
  n.mirostat_tau = chosen(0.2, 0.0, {3.0, 1e-3, 1e38});
  n.mirostat_eta = chosen(0.5, 0.1, {0.0, 1.0, -1e38});
  n.dynamic_temperature_range = chosen(0.2, 0.0, {0.3, 5.0, 1e38});
  n.dynamic_temperature_exponent = chosen(0.5, 1.0, {0.0, 2.0, -1.0, 1e30});
  n.adaptive_target = chosen(0.2, -1.0, {0.0, 0.5, 1.0, 1e38, std::nan("")});
  n.adaptive_decay = chosen(0.5, 0.9, {0.0, 0.99, -1e38});
  if (random.chance(0.6)) c.rules = random_rules(random, vocab);
  // A Sampler keeps the text wherever something looks at it; here it may also not.
  c.integers.keeps_text = random.chance(0.8) ? 1 : 0;
  const int64_t length = random.below(12);
  for (int64_t i = 0; i < length; ++i) {
    c.prompt.push_back(random.chance(0.1) ? -100 : random.below(std::min<int64_t>(vocab, 6)));
  }
  return c;
}

// ---- a sampler: its memory has the size of its rows, no byte more

struct Rows {
  SamplerLayout layout;
  int64_t batch;
  Buffer<char> memory;

  Rows(const SamplerLayout& l, int64_t rows)
      : layout(l), batch(rows), memory(Buffer<char>(rows * l.size)) {}

  char* at(int64_t row) const { return memory.data() + row * layout.size; }
  SamplerRowView view(int64_t row) const { return {at(row), layout}; }
  const SamplerRow& row(int64_t i) const { return *view(i).row; }

  void insert(int64_t row, const RowCase& c) const {
    SamplerInsertParams p;
    p.row = at(row);
    p.layout = layout;
    p.integers = c.integers;
    p.numbers = c.numbers;
    p.rules = c.rules.data();
    p.rules_size = static_cast<int64_t>(c.rules.size());
    p.prompt = c.prompt.data();
    p.prompt_length = static_cast<int64_t>(c.prompt.size());
    sampler_insert_cpu(p);
  }

  Rows copy(const SamplerLayout& to) const {
    Rows other(to, batch);
    for (int64_t row = 0; row < batch; ++row) {
      if (this->row(row).active) sampler_copy_row_cpu(at(row), layout, other.at(row), to);
    }
    return other;
  }
};

// What counts of the rows, in memory that differs in nothing else.
inline Buffer<char> bytes_of(const Rows& rows) { return rows.copy(rows.layout).memory; }

}  // namespace lmdecode::sampling::test
