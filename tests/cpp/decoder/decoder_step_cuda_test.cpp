// The emulated CUDA kernels of a decoder's step against sums in f64, on exact memory.
#include <cmath>
#include <iostream>
#include <random>
#include <vector>

#include "check.h"
#include "decoder/step_attention_kernel.cuh"
#include "decoder/step_rows_kernel.cuh"

namespace lmdecode::decoder::test {
namespace {

using namespace step_cuda_kernels;

class Random {
 public:
  explicit Random(uint64_t seed) : generator_(seed) {}
  int64_t below(int64_t bound) {
    return static_cast<int64_t>(generator_() % static_cast<uint64_t>(bound));
  }
  float number() { return static_cast<float>(below(2001) - 1000) / 500.0f; }

 private:
  std::mt19937_64 generator_;
};

template <class T>
struct Traits;
template <>
struct Traits<float> {
  static constexpr DType kDtype = DType::kFloat32;
  static constexpr double kTolerance = 2e-5;
};
template <>
struct Traits<Half> {
  static constexpr DType kDtype = DType::kFloat16;
  static constexpr double kTolerance = 4e-3;
};
template <>
struct Traits<BFloat16> {
  static constexpr DType kDtype = DType::kBFloat16;
  static constexpr double kTolerance = 3e-2;
};

template <class T>
std::vector<T> random_values(Random& random, int64_t count) {
  std::vector<T> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(ValueOf<T>::from(random.number()));
  return values;
}

template <class T>
double at(const std::vector<T>& values, int64_t i) {
  return to_float(values.at(static_cast<size_t>(i)));
}

// Whether a result is what it should be, by the dtype's tolerance.
template <class T>
bool is_near(double got, double expected) {
  return std::abs(got - expected) <= Traits<T>::kTolerance * (1.0 + std::abs(expected));
}

// scores to softmax with an epsilon in its denominator
void softmax(std::vector<double>& scores, double epsilon) {
  double top = -INFINITY, sum = 0.0;
  for (const double score : scores) top = std::max(top, score);
  for (double& score : scores) sum += score = std::exp(score - top);
  for (double& score : scores) score /= sum + epsilon * 1.0;
}

template <class Params, class Kernel>
void run(Kernel kernel, const Params& params, int64_t clusters, int64_t shared, uint64_t schedule,
         unsigned threads = 64, int cluster_size = 1) {
  const auto size = static_cast<unsigned>(cluster_size);
  emulation::launch(kernel, dim3(static_cast<unsigned>(clusters) * size), dim3(threads), size,
                    static_cast<size_t>(shared), schedule, params);
}

// Whether a cache has so many positions that blocks share them.
enum class Cache { kShort, kLong };

template <class T>
void check_self_attention(uint64_t seed, Cache cache = Cache::kShort) {
  Random random(seed);
  const bool is_long = cache == Cache::kLong;
  StepSelfAttentionParams p;
  const int64_t head_sizes[] = {1, 10, 16, 40, 70, 130};
  p.shape = {1 + random.below(2), head_sizes[random.below(6)], 0.3f,
             random.below(2) ? 1e-2f : 0.0f};
  p.dtype = Traits<T>::kDtype;
  p.rows = 1 + random.below(4);
  p.capacity = 1 + random.below(random.below(4) ? 20 : 300);
  if (is_long) p.capacity += 260 + random.below(500);
  const int parts = is_long ? 2 << random.below(3) : 1;
  const int64_t heads = p.shape.heads, size = p.shape.head_size, padded = p.shape.padded_head();
  const auto qkv = random_values<T>(random, p.rows * 3 * heads * size);
  auto keys = random_values<T>(random, p.rows * heads * p.capacity * padded);
  auto values = random_values<T>(random, p.rows * heads * p.capacity * padded);
  auto expected_keys = keys, expected_values = values;
  std::vector<T> out(static_cast<size_t>(p.rows * heads * size));
  std::vector<int32_t> table, positions;
  // Rows are in step, as those of a search, or out of range.
  const int64_t position = random.below(p.capacity);
  for (int64_t row = 0; row < p.rows; ++row) {
    const int64_t kind = random.below(8);
    positions.push_back(static_cast<int32_t>(kind == 0 ? -1 : kind == 1 ? p.capacity : position));
    for (int64_t t = 0; t < p.capacity; ++t) {
      table.push_back(static_cast<int32_t>(random.below(p.rows + 1)));  // one that is no row, too
    }
  }
  p.bias_stride = p.capacity + random.below(3);
  const auto bias = random_values<float>(random, heads * p.bias_stride);
  if (random.below(2)) p.bias = bias.data();
  p.qkv = qkv.data();
  p.out = out.data();
  p.keys = keys.data();
  p.values = values.data();
  p.table = table.data();
  p.positions = positions.data();
  run(&decoder_self_attention_kernel<T>, p, 1 + random.below(3),
      self_attention_shared_bytes(p, parts), seed % 6, random.below(2) ? 32 : 128, parts);

  const auto cell = [&](int64_t row, int64_t head, int64_t t) {
    return ((row * heads + head) * p.capacity + t) * padded;
  };
  const auto is_inside = [&](int64_t row) {
    const int64_t t = positions[static_cast<size_t>(row)];
    return t >= 0 && t < p.capacity;
  };
  for (int64_t row = 0; row < p.rows; ++row) {
    if (!is_inside(row)) continue;
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t d = 0; d < padded; ++d) {
        const auto to =
            static_cast<size_t>(cell(row, head, positions[static_cast<size_t>(row)]) + d);
        const auto from = static_cast<size_t>(((row * 3 + 1) * heads + head) * size + d);
        const auto values_from = from + static_cast<size_t>(heads * size);
        expected_keys[to] = d < size ? qkv[from] : ValueOf<T>::from(0.0f);
        expected_values[to] = d < size ? qkv[values_from] : ValueOf<T>::from(0.0f);
      }
    }
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    CHECK(to_float(keys[i]) == to_float(expected_keys[i]));
    CHECK(to_float(values[i]) == to_float(expected_values[i]));
  }
  for (int64_t row = 0; row < p.rows; ++row) {
    for (int64_t head = 0; head < heads; ++head) {
      std::vector<double> scores;
      std::vector<int64_t> cells;
      const int64_t last = is_inside(row) ? positions[static_cast<size_t>(row)] : -1;
      for (int64_t t = 0; t <= last; ++t) {
        const int64_t entry = table[static_cast<size_t>(row * p.capacity + t)];
        cells.push_back(cell(t == last || entry >= p.rows ? row : entry, head, t));
        double score = p.bias ? at(bias, head * p.bias_stride + last - t) : 0.0;
        for (int64_t d = 0; d < size; ++d) {
          score += at(qkv, (row * 3 * heads + head) * size + d) * static_cast<double>(0.3f) *
                   at(expected_keys, cells.back() + d);
        }
        scores.push_back(score);
      }
      softmax(scores, static_cast<double>(p.shape.denominator_epsilon));
      for (int64_t d = 0; d < size; ++d) {
        double expected = 0.0;
        for (size_t t = 0; t < scores.size(); ++t) {
          expected += scores[t] * at(expected_values, cells[t] + d);
        }
        CHECK(is_near<T>(at(out, (row * heads + head) * size + d), expected));
      }
    }
  }
}

// The cache that a memory is laid out in, and attention to it.
template <class T>
void check_cross_attention(uint64_t seed, Cache cache = Cache::kShort) {
  Random random(seed);
  const bool is_long = cache == Cache::kLong;
  const int64_t head_sizes[] = {1, 10, 16, 40, 70, 130};
  StepCrossCacheParams c;
  c.shape = {1 + random.below(2), head_sizes[random.below(6)], 0.3f,
             random.below(2) ? 1e-2f : 0.0f};
  c.dtype = Traits<T>::kDtype;
  c.requests = 1 + random.below(3);
  c.source = kAttentionBlock * (1 + random.below(random.below(4) ? 2 : 20));
  if (is_long) c.source += kAttentionBlock * (16 + random.below(30));
  const int parts = is_long ? 2 << random.below(3) : 1;
  c.length = random.below(c.source + 1);
  const int64_t heads = c.shape.heads, size = c.shape.head_size, padded = c.shape.padded_head();
  const auto key_value = random_values<T>(random, c.requests * c.length * 2 * heads * size);
  const auto area = static_cast<size_t>(c.requests * heads * padded * c.source);
  std::vector<T> keys(area, ValueOf<T>::from(7.0f)), values(area, ValueOf<T>::from(7.0f));
  c.key_value = key_value.data();
  c.keys = keys.data();
  c.values = values.data();
  run(&decoder_cross_cache_kernel<T>, c, 1 + random.below(3), 0, seed % 6);
  const auto state = [&](int64_t request, int64_t s, int64_t which, int64_t head, int64_t d) {
    if (s >= c.length || d >= size) return 0.0;
    return at(key_value, (((request * c.length + s) * 2 + which) * heads + head) * size + d);
  };
  for (int64_t item = 0; item < c.requests * heads; ++item) {
    for (int64_t s = 0; s < c.source; ++s) {
      for (int64_t d = 0; d < padded; ++d) {
        const int64_t request = item / heads, head = item % heads;
        CHECK(at(keys, (item * padded + d) * c.source + s) == state(request, s, 0, head, d));
        CHECK(at(values, (item * c.source + s) * padded + d) == state(request, s, 1, head, d));
      }
    }
  }

  StepCrossAttentionParams p;
  p.shape = c.shape;
  p.dtype = c.dtype;
  p.requests = c.requests;
  p.request_rows = random.below(7);
  p.source = c.source;
  const int64_t rows = p.requests * p.request_rows;
  const auto queries = random_values<T>(random, rows * heads * size);
  std::vector<T> out(queries.size());
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < p.requests; ++i) {
    lengths.push_back(random.below(6) == 0 ? INT64_MAX - 1 : random.below(p.source + 1));
    if (random.below(6) == 0) lengths.back() = -3;
  }
  p.queries = queries.data();
  p.out = out.data();
  p.keys = keys.data();
  p.values = values.data();
  p.lengths = lengths.data();
  run(&decoder_cross_attention_kernel<T>, p, 1 + random.below(4),
      cross_attention_shared_bytes(p, parts), seed % 6, random.below(2) ? 32 : 128, parts);
  for (int64_t item = 0; item < rows * heads; ++item) {
    const int64_t row = item / heads, head = item % heads, request = row / p.request_rows;
    const int64_t length =
        std::min(std::max(lengths[static_cast<size_t>(request)], int64_t{0}), p.source);
    std::vector<double> scores;
    for (int64_t s = 0; s < length; ++s) {
      double score = 0.0;
      for (int64_t d = 0; d < size; ++d) {
        score += at(queries, item * size + d) * static_cast<double>(0.3f) *
                 state(request, s, 0, head, d);
      }
      scores.push_back(score);
    }
    softmax(scores, static_cast<double>(p.shape.denominator_epsilon));
    for (int64_t d = 0; d < size; ++d) {
      double expected = 0.0;
      for (int64_t s = 0; s < length; ++s) {
        expected += scores[static_cast<size_t>(s)] * state(request, s, 1, head, d);
      }
      CHECK(is_near<T>(at(out, item * size + d), expected));
    }
  }
}

template <class T>
void check_add_norm(uint64_t seed) {
  Random random(seed);
  StepAddNormParams p;
  p.dtype = Traits<T>::kDtype;
  p.rows = 1 + random.below(3);
  p.size = 1 + random.below(700);
  p.epsilon = 1e-2f;
  p.rms_norm = random.below(2);
  p.norm_first = random.below(2);
  auto x = random_values<float>(random, p.rows * p.size);
  const auto before = x, bias = random_values<float>(random, p.size),
             gamma = random_values<float>(random, p.size),
             beta = random_values<float>(random, p.size);
  const auto delta = random_values<T>(random, p.rows * p.size);
  std::vector<T> out(delta.size());
  p.x = x.data();
  if (random.below(4)) p.delta = delta.data();
  if (random.below(2)) p.bias = bias.data();
  if (random.below(4)) p.gamma = gamma.data();
  if (!p.rms_norm && random.below(2)) p.beta = beta.data();
  p.out = out.data();
  run(&decoder_add_norm_kernel<T>, p, 1 + random.below(2), sizeof(StepStorage), seed % 6);
  for (int64_t row = 0; row < p.rows; ++row) {
    std::vector<double> sum;
    double mean = 0.0, variance = 0.0;
    for (int64_t i = 0; i < p.size; ++i) {
      const int64_t place = row * p.size + i;
      sum.push_back(at(before, place) + (p.delta ? at(delta, place) : 0.0) +
                    (p.bias ? at(bias, i) : 0.0));
      if (!p.rms_norm) mean += sum.back() / static_cast<double>(p.size);
    }
    for (const double value : sum) {
      variance += (value - mean) * (value - mean) / static_cast<double>(p.size);
    }
    for (int64_t i = 0; i < p.size; ++i) {
      const double value = sum[static_cast<size_t>(i)];
      double normed = value;
      if (p.gamma) {
        normed =
            (value - mean) / std::sqrt(variance + static_cast<double>(p.epsilon)) * at(gamma, i) +
            (p.beta ? at(beta, i) : 0.0);
      }
      CHECK(is_near<T>(at(out, row * p.size + i), normed));
      CHECK(is_near<float>(at(x, row * p.size + i), p.norm_first ? value : normed));
    }
  }
}

template <class T>
void check_embed(uint64_t seed) {
  Random random(seed);
  StepEmbedParams p;
  p.dtype = Traits<T>::kDtype;
  p.rows = 1 + random.below(4);
  p.size = 1 + random.below(50);
  p.vocab = 1 + random.below(9);
  p.num_positions = random.below(6);
  p.position_offset = random.below(3);
  p.scale = 3.0f;
  const auto embedding = random_values<T>(random, p.vocab * p.size);
  const auto table = random_values<float>(random, p.num_positions * p.size);
  std::vector<int64_t> tokens;
  std::vector<int32_t> positions;
  std::vector<float> x(static_cast<size_t>(p.rows * p.size));
  for (int64_t row = 0; row < p.rows; ++row) {
    tokens.push_back(random.below(p.vocab + 2) - 1);
    positions.push_back(static_cast<int32_t>(random.below(8) - 3));
  }
  p.tokens = tokens.data();
  p.positions = positions.data();
  p.embedding = embedding.data();
  if (random.below(2)) p.position_table = table.data();
  p.x = x.data();
  run(&decoder_embed_kernel<T>, p, 1 + random.below(2), 0, seed % 6);
  for (int64_t i = 0; i < p.rows * p.size; ++i) {
    const int64_t token = tokens[static_cast<size_t>(i / p.size)];
    const int64_t position = positions[static_cast<size_t>(i / p.size)] + p.position_offset;
    double expected = 0.0;
    if (token >= 0 && token < p.vocab) expected += 3.0 * at(embedding, token * p.size + i % p.size);
    if (p.position_table != nullptr && position >= 0 && position < p.num_positions) {
      expected += at(table, position * p.size + i % p.size);
    }
    CHECK(is_near<float>(at(x, i), expected));
  }
}

[[maybe_unused]] double activated_in_f64(double x, StepActivation activation) {
  switch (activation) {
    case StepActivation::kRelu:
      return std::max(x, 0.0);
    case StepActivation::kGelu:
      return 0.5 * x * (1.0 + std::erf(x / std::sqrt(2.0)));
    case StepActivation::kGeluTanh:
      return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
    default:
      return x / (1.0 + std::exp(-x));
  }
}

template <class T>
void check_activate(uint64_t seed) {
  Random random(seed);
  StepActivateParams p;
  p.dtype = Traits<T>::kDtype;
  p.count = 1 + random.below(200);
  p.activation = static_cast<StepActivation>(1 + random.below(4));
  auto up = random_values<T>(random, p.count);
  const auto before = up, gate = random_values<T>(random, p.count);
  p.up = up.data();
  if (random.below(2)) p.gate = gate.data();
  run(&decoder_activate_kernel<T>, p, 1 + random.below(2), 0, seed % 6);
  for (int64_t i = 0; i < p.count; ++i) {
    const double expected = p.gate == nullptr
                                ? activated_in_f64(at(before, i), p.activation)
                                : activated_in_f64(at(gate, i), p.activation) * at(before, i);
    CHECK(is_near<T>(at(up, i), expected));
  }
}

#if !defined(LMD_PLANT_MISSING_BARRIER)

#define LMD_TEST_DTYPES(name, count)                  \
  TEST(name) {                                        \
    for (uint64_t seed = 0; seed < (count); ++seed) { \
      check_##name<float>(seed);                      \
      check_##name<Half>(seed);                       \
      check_##name<BFloat16>(seed);                   \
    }                                                 \
  }

LMD_TEST_DTYPES(self_attention, 60)
LMD_TEST_DTYPES(cross_attention, 60)
LMD_TEST_DTYPES(add_norm, 80)
LMD_TEST_DTYPES(embed, 60)
LMD_TEST_DTYPES(activate, 60)
#undef LMD_TEST_DTYPES

TEST(blocks_share_long_caches) {
  for (uint64_t seed = 0; seed < 24; ++seed) {
    check_self_attention<float>(seed + 500, Cache::kLong);
    check_self_attention<Half>(seed + 500, Cache::kLong);
    check_cross_attention<float>(seed + 500, Cache::kLong);
    check_cross_attention<BFloat16>(seed + 500, Cache::kLong);
  }
}

// Each position is in one part, parts begin where vectors of positions do, and no cache has a part
// that is larger than what its blocks have room for.
TEST(parts_of_positions) {
  for (int64_t capacity = 1; capacity < 5000; capacity += 1 + capacity / 9) {
    const int parts = parts_of_cache(capacity, 8);
    CHECK(parts == 1 || parts * step_cuda_tuning::kPositionsOfPart < 2 * capacity);
    CHECK(parts == 8 || parts * step_cuda_tuning::kPositionsOfPart >= capacity);
    CHECK_EQ(parts_of_cache(capacity, 1), 1);
    for (const int64_t blocks : {1, 2, 4, 8}) {
      CHECK_EQ(part_size(0, blocks), 0);
      for (int64_t count = 1; count <= capacity; ++count) {
        const int64_t size = part_size(count, blocks);
        CHECK(size * blocks >= count && size <= part_size(capacity, blocks));
        CHECK(size == count || size % kAttentionBlock == 0);
      }
    }
  }
}

// Every f16 comes back, and what lies between two of them goes to the nearer, ties to even.
TEST(rounding) {
  for (uint32_t bits = 0; bits < 0x7c00; ++bits) {
    const Half low{static_cast<uint16_t>(bits)}, high{static_cast<uint16_t>(bits + 1)};
    CHECK_EQ(ValueOf<Half>::from(to_float(low)).bits, low.bits);
    CHECK_EQ(ValueOf<Half>::from(-to_float(low)).bits, low.bits | 0x8000u);
    if (bits + 1 == 0x7c00) continue;
    const float middle = (to_float(low) + to_float(high)) / 2;
    CHECK_EQ(ValueOf<Half>::from(middle).bits, bits % 2 == 0 ? low.bits : high.bits);
    CHECK_EQ(ValueOf<Half>::from(std::nextafter(middle, 0.0f)).bits, low.bits);
    CHECK_EQ(ValueOf<Half>::from(std::nextafter(middle, 1e9f)).bits, high.bits);
  }
  CHECK_EQ(ValueOf<Half>::from(65519.0f).bits, 0x7bff);
  CHECK_EQ(ValueOf<Half>::from(65520.0f).bits, 0x7c00);
  CHECK_EQ(ValueOf<Half>::from(-INFINITY).bits, 0xfc00);
  CHECK(std::isnan(to_float(ValueOf<Half>::from(NAN))));
  for (uint32_t bits = 0; bits < 0x7f80; ++bits) {
    const BFloat16 low{static_cast<uint16_t>(bits)};
    CHECK_EQ(ValueOf<BFloat16>::from(to_float(low)).bits, low.bits);
    const float middle = float_of((bits << 16) + 0x8000u);
    CHECK_EQ(ValueOf<BFloat16>::from(middle).bits, bits + bits % 2);
  }
  CHECK(std::isnan(to_float(ValueOf<BFloat16>::from(NAN))));
}

#else

template <class Check>
bool is_noticed(Check check) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    try {
      check(seed);
    } catch (const std::exception&) {
      return true;
    }
  }
  return false;
}

TEST(missing_barriers) {
  CHECK(is_noticed([](uint64_t seed) { check_self_attention<float>(seed, Cache::kLong); }));
  CHECK(is_noticed([](uint64_t seed) { check_cross_attention<float>(seed, Cache::kLong); }));
}

#endif

}  // namespace
}  // namespace lmdecode::decoder::test

CHECK_MAIN()
