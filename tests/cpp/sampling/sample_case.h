// Random calls of top_k_top_p_sample in heap buffers of exactly the size that strides span.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "sampling/top_k_top_p_sample.h"

namespace lmdecode::sampling::test {

class Random {
 public:
  explicit Random(uint64_t seed) : generator_(seed) {}
  // In [0, bound).
  int64_t below(int64_t bound) {
    return static_cast<int64_t>(generator_() % static_cast<uint64_t>(bound));
  }
  bool chance(double p) { return uniform() < p; }
  double uniform() { return static_cast<double>(generator_() >> 11) * 0x1p-53; }
  double normal() { return normal_(generator_); }
  template <class T>
  T any_of(std::initializer_list<T> list) {
    return list.begin()[below(static_cast<int64_t>(list.size()))];
  }

 private:
  std::mt19937_64 generator_;
  std::normal_distribution<double> normal_;
};

// Of `size` elements, no byte more.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t size)
      : data_(std::make_unique<unsigned char[]>(static_cast<size_t>(size) * sizeof(T))),
        size_(size) {}
  T* data() const { return reinterpret_cast<T*>(data_.get()); }
  T& operator[](int64_t i) const { return data()[i]; }
  int64_t size() const { return size_; }
  int64_t bytes() const { return size_ * static_cast<int64_t>(sizeof(T)); }
  bool operator==(const Buffer& other) const {
    return size_ == other.size_ &&
           (size_ == 0 || std::memcmp(data(), other.data(), static_cast<size_t>(bytes())) == 0);
  }

 private:
  std::unique_ptr<unsigned char[]> data_;
  int64_t size_ = 0;
};

inline float round_to(DType dtype, float value, uint16_t* bits) {
  const uint32_t b = bits_of(value);
  if (dtype == DType::kBFloat16) {
    *bits = static_cast<uint16_t>(value != value ? 0x7fc0 : (b + 0x7fff + (b >> 16 & 1)) >> 16);
    return to_float(BFloat16{*bits});
  }
  _Float16 half = static_cast<_Float16>(value);
  std::memcpy(bits, &half, 2);
  return to_float(Half{*bits});
}

// What a call writes.
struct SampleResult {
  SampleResult(int64_t batch, int64_t vocab, bool with_logits, bool with_logprob)
      : index(batch),
        kept_logits(with_logits ? batch * vocab : 0),
        logprob(with_logprob ? batch : 0),
        kept_count(batch),
        status(batch) {}

  Buffer<int64_t> index;
  Buffer<float> kept_logits;
  Buffer<float> logprob;
  Buffer<int32_t> kept_count;
  Buffer<uint8_t> status;

  bool operator==(const SampleResult&) const = default;
};

struct SampleCase {
  TopKTopPSampleParams params;  // without outputs
  bool with_logits = true;
  bool with_logprob = true;
  std::string logits_kind;

  Buffer<unsigned char> logits;
  Buffer<float> q;
  Buffer<int64_t> top_k, seed, position;
  Buffer<float> top_p, min_p, temperature;

  SampleResult make_result() const {
    return SampleResult(params.batch, params.vocab, with_logits, with_logprob);
  }

  TopKTopPSampleParams params_into(const SampleResult& result) const {
    TopKTopPSampleParams p = params;
    p.index = result.index.data();
    p.kept_logits = with_logits ? result.kept_logits.data() : nullptr;
    p.logprob = with_logprob ? result.logprob.data() : nullptr;
    p.kept_count = result.kept_count.data();
    p.status = result.status.data();
    return p;
  }

  std::string describe() const {
    std::ostringstream text;
    text << "batch " << params.batch << " vocab " << params.vocab << " dtype "
         << static_cast<int>(params.dtype) << " dialect " << static_cast<int64_t>(params.dialect)
         << " strides " << params.logits_row_stride << "," << params.logits_vocab_stride
         << " logits " << logits_kind;
    for (int64_t row = 0; row < params.batch; ++row) {
      text << "\n  row " << row << " top_k " << params.top_k.at(row) << " top_p "
           << params.top_p.at(row) << " min_p " << params.min_p.at(row) << " temperature "
           << params.temperature.at(row);
      if (params.q) text << " q";
      if (params.has_seed) text << " seed " << params.seed.at(row);
    }
    return text.str();
  }
};

inline float random_logit(Random& random, const std::string& kind, int64_t i, int64_t vocab) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float normal = static_cast<float>(random.normal());
  if (kind == "normal") return 3.0f * normal;
  if (kind == "flat") return 0.01f * normal;
  if (kind == "peaked") return 30.0f * normal;
  if (kind == "ties") return static_cast<float>(random.below(4)) * 0.5f - 1.0f;
  if (kind == "equal") return -2.5f;
  if (kind == "zeros") return random.chance(0.5) ? 0.0f : -0.0f;
  if (kind == "ascending") return static_cast<float>(i) / static_cast<float>(vocab) * 10.0f;
  if (kind == "masked") return random.chance(0.8) ? -infinity : normal;
  if (kind == "infinite")
    return random.chance(0.15) ? infinity : random.chance(0.2) ? -infinity : normal;
  if (kind == "nan")
    return random.chance(0.2) ? nan : random.chance(0.1) ? -infinity : 2.0f * normal;
  if (kind == "none") return random.chance(0.5) ? -infinity : nan;
  if (kind == "huge") return normal * 2e38f;
  if (kind == "tiny") return normal * 1e-39f;
  if (kind == "neighbours")
    return float_of(bits_of(5.0f) + static_cast<uint32_t>(random.below(12)));
  return static_cast<float>(random.uniform()) * 4.0f / static_cast<float>(vocab);  // probabilities
}

inline SampleCase random_case(uint64_t seed, int64_t batch, int64_t vocab) {
  Random random(seed);
  SampleCase c;
  TopKTopPSampleParams& p = c.params;
  p.batch = batch;
  p.vocab = vocab;
  p.dtype = random.any_of({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  p.dialect = static_cast<Dialect>(random.chance(0.3) ? 0 : random.below(kDialectCount));
  c.with_logits = random.chance(0.7);
  c.with_logprob = random.chance(0.6);
  const bool probabilities = p.dialect == Dialect::kAscendV2Probabilities;

  // Logits.
  c.logits_kind = random.any_of({"normal", "normal", "flat", "peaked", "ties", "ties", "equal",
                                 "zeros", "ascending", "masked", "infinite", "nan", "none", "huge",
                                 "tiny", "neighbours"});
  if (probabilities && random.chance(0.8)) c.logits_kind = "probabilities";
  p.logits_vocab_stride = random.chance(0.75) ? 1 : random.below(4);
  const int64_t span = (vocab - 1) * p.logits_vocab_stride + 1;
  p.logits_row_stride = random.chance(0.1) ? 0 : span + (random.chance(0.5) ? 0 : random.below(9));
  const int64_t offset = random.chance(0.4) ? 0 : random.below(9);  // alignment
  const int64_t elements = offset + (batch - 1) * p.logits_row_stride + span;
  const int64_t element_bytes = p.dtype == DType::kFloat32 ? 4 : 2;
  c.logits = Buffer<unsigned char>(elements * element_bytes);
  for (int64_t i = 0; i < elements; ++i) {
    const float value = random_logit(random, c.logits_kind, i % vocab, vocab);
    unsigned char* to = c.logits.data() + i * element_bytes;
    if (p.dtype == DType::kFloat32) {
      std::memcpy(to, &value, 4);
    } else {
      uint16_t bits;
      round_to(p.dtype, value, &bits);
      std::memcpy(to, &bits, 2);
    }
  }
  p.logits = c.logits.data() + offset * element_bytes;

  // Parameters: one for all rows, or one a row, strided.
  const auto fill_rows = [&](auto& buffer, auto& parameter, auto draw) {
    parameter.value = draw();
    if (random.chance(0.4)) return;
    parameter.stride = random.below(4);
    buffer = std::remove_reference_t<decltype(buffer)>((batch - 1) * parameter.stride + 1);
    for (int64_t i = 0; i <= (batch - 1) * parameter.stride; ++i) buffer[i] = draw();
    parameter.rows = buffer.data();
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const bool use_k = random.chance(0.6), use_p = random.chance(0.6), use_min_p = random.chance(0.4);
  fill_rows(c.top_k, p.top_k, [&]() -> int64_t {
    if (!use_k) return 0;
    return random.chance(0.5)
               ? 1 + random.below(vocab)
               : random.any_of<int64_t>({1, 2, 5, 50, vocab - 1, vocab, vocab + 5, -3, 0,
                                         std::numeric_limits<int64_t>::max()});
  });
  fill_rows(c.top_p, p.top_p, [&] {
    if (!use_p) return 1.0f;
    return random.chance(0.5) ? static_cast<float>(random.uniform())
                              : random.any_of({0.0f, 1.0f, 0.9f, 0.5f, 0.999999f, 1e-6f, 1e-30f,
                                               1e-40f, -1.0f, nan, 2.0f});
  });
  fill_rows(c.min_p, p.min_p, [&] {
    if (!use_min_p) return 0.0f;
    return random.any_of({0.0f, 0.1f, 0.5f, 0.9f, 1.0f, 1.5f, nan, 1e-20f, 1e-40f, -1.0f});
  });
  fill_rows(c.temperature, p.temperature, [&] {
    return random.chance(0.4) ? 1.0f
                              : random.any_of({0.0f, 0.7f, 1.3f, 0.25f, 2.5f, 1e-3f, 100.0f, 1e-30f,
                                               1e30f, 1e-44f, infinity, nan, -1.0f, -0.0f});
  });

  // Noise.
  const int64_t noise = random.below(4);
  if (noise == 0) {
    p.q_vocab_stride = random.chance(0.7) ? 1 : random.below(4);
    const int64_t q_span = (vocab - 1) * p.q_vocab_stride + 1;
    p.q_row_stride = q_span + random.below(3);
    const int64_t size = (batch - 1) * p.q_row_stride + q_span;
    c.q = Buffer<float>(size);
    const bool odd = random.chance(0.3), constant = random.chance(0.2);
    for (int64_t i = 0; i < size; ++i) {
      c.q[i] = constant ? 0.5f : static_cast<float>(-std::log1p(-random.uniform()));
      if (odd && random.chance(0.2)) c.q[i] = random.any_of({0.0f, -1.0f, nan, infinity, 1e-40f});
    }
    p.q = c.q.data();
    p.eps = random.any_of({1e-8f, 0.0f, 1e-3f});
  } else if (noise < 3) {
    p.has_seed = true;
    fill_rows(c.seed, p.seed,
              [&] { return random.chance(0.2) ? int64_t{-1} : random.below(int64_t{1} << 62); });
    fill_rows(c.position, p.position, [&] { return random.below(int64_t{1} << 40); });
  }
  return c;
}

// Where two results differ, for a message.
inline std::string difference(const SampleCase& c, const SampleResult& a, const SampleResult& b) {
  std::ostringstream text;
  for (int64_t row = 0; row < c.params.batch; ++row) {
    text << "\n  row " << row << ": index " << a.index[row] << " and " << b.index[row] << ", kept "
         << a.kept_count[row] << " and " << b.kept_count[row] << ", status " << int(a.status[row])
         << " and " << int(b.status[row]);
    if (c.with_logprob) text << ", logprob " << a.logprob[row] << " and " << b.logprob[row];
    if (!c.with_logits) continue;
    for (int64_t i = 0; i < c.params.vocab; ++i) {
      const float x = a.kept_logits[row * c.params.vocab + i],
                  y = b.kept_logits[row * c.params.vocab + i];
      if (bits_of(x) == bits_of(y)) continue;
      text << ", kept_logits[" << i << "] " << x << " and " << y;
      break;
    }
  }
  return text.str();
}

}  // namespace lmdecode::sampling::test
