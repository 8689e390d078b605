// The attention of a step at every level against sums in f64, on memory of exactly its size.
#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "common/half.h"
#include "decoder/step_attention.h"
#include "simd/cpu_capability.h"

namespace lmdecode::decoder {

namespace {

struct Level {
  decltype(&default_::decoder::self_attention_items) self;
  decltype(&default_::decoder::cross_attention_items) cross;
  decltype(&default_::decoder::step_attention_scratch) scratch;
};

std::vector<Level> levels() {
  std::vector<Level> list = {{default_::decoder::self_attention_items,
                              default_::decoder::cross_attention_items,
                              default_::decoder::step_attention_scratch}};
#if defined(LMD_HAS_AVX512)
  if (max_cpu_capability() >= CpuCapability::kAvx2) {
    list.push_back({avx2::decoder::self_attention_items, avx2::decoder::cross_attention_items,
                    avx2::decoder::step_attention_scratch});
  }
  if (max_cpu_capability() >= CpuCapability::kAvx512) {
    list.push_back({avx512::decoder::self_attention_items, avx512::decoder::cross_attention_items,
                    avx512::decoder::step_attention_scratch});
  }
#endif
  return list;
}

std::vector<float> random_floats(int64_t count, int seed) {
  std::mt19937 generator(static_cast<unsigned>(seed));
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

// The heads' padding is 0.
std::vector<float> random_heads(int64_t rows, const AttentionShape& shape, int seed) {
  std::vector<float> values = random_floats(rows * shape.padded_head(), seed);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = shape.head_size; i < shape.padded_head(); ++i) {
      values[static_cast<size_t>(row * shape.padded_head() + i)] = 0.0f;
    }
  }
  return values;
}

std::vector<double> softmax(std::vector<double> scores, double epsilon) {
  double top = -HUGE_VAL, sum = epsilon;
  for (const double score : scores) top = std::max(top, score);
  for (double& score : scores) sum += score = std::exp(score - top);
  for (double& score : scores) score /= sum;
  return scores;
}

void check_near(float got, double expected) {
  CHECK(std::abs(static_cast<double>(got) - expected) < 1e-5 * (1.0 + std::abs(expected)));
}

void check_self(const Level& level, int64_t head_size, bool with_bias) {
  const AttentionShape shape{3, head_size, 0.3f, with_bias ? 0.0f : 1e-2f};
  const int64_t rows = 4, capacity = 21, padded = shape.padded_head();
  std::vector<float> keys = random_heads(rows * 3 * capacity, shape, 1);
  std::vector<float> values = random_heads(rows * 3 * capacity, shape, 2);
  const std::vector<float> qkv = random_floats(rows * 3 * shape.size(), 3);
  const std::vector<float> bias = random_floats(3 * capacity, 4);
  std::vector<float> out(static_cast<size_t>(rows * shape.size()));
  const std::vector<int32_t> cache_rows = {2, 0, 3, 1}, positions = {0, 20, 7, 16};
  std::vector<int32_t> table;
  for (int64_t i = 0; i < rows * capacity; ++i) table.push_back(static_cast<int32_t>(i * 7 % 4));
  SelfAttentionParams p;
  p.shape = shape;
  p.rows = {rows, cache_rows.data(), positions.data(), nullptr, nullptr, 0};
  p.capacity = capacity;
  p.qkv = qkv.data();
  p.out = out.data();
  p.keys = keys.data();
  p.values = values.data();
  p.table = table.data();
  p.bias = with_bias ? bias.data() : nullptr;
  p.bias_stride = capacity;
  std::vector<float> scratch(static_cast<size_t>(level.scratch(shape, capacity)));
  level.self(p, 0, rows * 3, scratch.data());
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t head = 0; head < 3; ++head) {
      const size_t first = static_cast<size_t>(row);
      std::vector<size_t> at;
      std::vector<double> scores;
      for (int64_t t = 0; t <= positions[first]; ++t) {
        const int64_t from = table[static_cast<size_t>(cache_rows[first] * capacity + t)];
        at.push_back(static_cast<size_t>(((from * 3 + head) * capacity + t) * padded));
        double score = 0.0;
        for (int64_t i = 0; i < head_size; ++i) {
          const size_t q = static_cast<size_t>(row * 3 * shape.size() + head * head_size + i);
          score += static_cast<double>(qkv[q]) * keys[at.back() + static_cast<size_t>(i)];
        }
        const size_t distance = static_cast<size_t>(head * capacity + positions[first] - t);
        scores.push_back(score * 0.3f + (with_bias ? bias[distance] : 0.0f));
      }
      const std::vector<double> weights = softmax(scores, shape.denominator_epsilon);
      for (int64_t i = 0; i < head_size; ++i) {
        double expected = 0.0;
        for (size_t t = 0; t < at.size(); ++t) {
          expected += weights[t] * values[at[t] + static_cast<size_t>(i)];
        }
        check_near(out[static_cast<size_t>(row * shape.size() + head * head_size + i)], expected);
      }
    }
  }
}

void check_cross(const Level& level, int64_t head_size, int64_t length) {
  const AttentionShape shape{2, head_size, 0.4f, 0.0f};
  const int64_t rows = 9, source = 48, padded = shape.padded_head();
  const std::vector<float> keys = random_floats(2 * 2 * padded * source, 5);
  const std::vector<float> values = random_heads(2 * 2 * source, shape, 6);
  const std::vector<float> queries = random_floats(rows * shape.size(), 7);
  std::vector<float> out(static_cast<size_t>(rows * shape.size()), 3.0f);
  const std::vector<int64_t> lengths = {length, source};
  const std::vector<int32_t> requests = {1, 0, 0, 0, 0, 0, 0, 1, 1}, run_begins = {0, 1, 7, 9};
  CrossAttentionParams p;
  p.shape = shape;
  p.rows = {rows, nullptr, nullptr, requests.data(), run_begins.data(), 3};
  p.source = source;
  p.queries = queries.data();
  p.out = out.data();
  p.keys = keys.data();
  p.values = values.data();
  p.lengths = lengths.data();
  std::vector<float> scratch(static_cast<size_t>(level.scratch(shape, source)));
  level.cross(p, 0, 3 * 2, scratch.data());
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t request = requests[static_cast<size_t>(row)];
    for (int64_t head = 0; head < 2; ++head) {
      const int64_t cache = (request * 2 + head) * source * padded;
      std::vector<double> scores;
      for (int64_t s = 0; s < lengths[static_cast<size_t>(request)]; ++s) {
        double score = 0.0;
        for (int64_t i = 0; i < head_size; ++i) {
          const size_t q = static_cast<size_t>(row * shape.size() + head * head_size + i);
          score +=
              static_cast<double>(queries[q]) * keys[static_cast<size_t>(cache + i * source + s)];
        }
        scores.push_back(score * 0.4f);
      }
      const std::vector<double> weights = softmax(scores, 0.0);
      for (int64_t i = 0; i < head_size; ++i) {
        double expected = 0.0;
        for (size_t s = 0; s < weights.size(); ++s) {
          expected += weights[s] *
                      values[static_cast<size_t>(cache + static_cast<int64_t>(s) * padded + i)];
        }
        check_near(out[static_cast<size_t>(row * shape.size() + head * head_size + i)], expected);
      }
    }
  }
}

TEST(self_attention_through_the_table) {
  for (const Level& level : levels()) {
    for (const int64_t head_size : {1, 7, 16, 33, 64, 80}) {
      check_self(level, head_size, false);
      check_self(level, head_size, true);
    }
  }
}

TEST(cross_attention_to_a_shared_memory) {
  for (const Level& level : levels()) {
    for (const int64_t head_size : {1, 16, 33, 64}) {
      for (const int64_t length : {0, 1, 15, 16, 17, 33, 48}) check_cross(level, head_size, length);
    }
  }
}

}  // namespace
}  // namespace lmdecode::decoder

CHECK_MAIN()
