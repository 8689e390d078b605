// Compiled once for each CPU capability, with LMD_SIMD naming it.
#include "decoder/part_vectors.h"
#include "decoder/state_layer_kernels.h"
#include "simd/vec_math.h"

namespace lmdecode::LMD_SIMD::decoder {

using namespace lmdecode::decoder;

namespace {

constexpr int kVectors = static_cast<int>(kStateColumns) / kLanes;
// Number of interleaved sums over the keys, so that additions do not wait for each other.
constexpr int kSums = kVectors <= 2 ? 2 : 1;

inline float dot(const float* a, const float* b, int64_t size) {
  F32 sum = splat(0.0f);
  for (int64_t i = 0; i < size; i += kLanes) {
    sum = multiply_add(read(a + i, size - i), read(b + i, size - i), sum);
  }
  return reduce_add(sum);
}

inline void scale(float* a, float factor, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) {
    write(a + i, read(a + i, size - i) * splat(factor), size - i);
  }
}

// S^T k and S^T q of some columns.
struct Products {
  F32 key[kVectors], query[kVectors];
};

// One pass over s [size, kStateColumns]: with kUpdate s = decay s + key delta^T before, with
// kProducts the products with the next token's key and query.
template <bool kUpdate, bool kProducts>
inline void pass(float* s, int64_t size, float decay, const float* key, const F32* delta,
                 const float* next_key, const float* next_query, Products* products) {
  F32 keys[kSums][kVectors], queries[kSums][kVectors];
  for (int sum = 0; sum < kSums; ++sum) {
    for (int v = 0; v < kVectors; ++v) keys[sum][v] = queries[sum][v] = splat(0.0f);
  }
  const F32 g = splat(decay);
  const auto take = [&](int64_t i, F32* key_sums, F32* query_sums) {
    float* const row = s + i * kStateColumns;
    for (int v = 0; v < kVectors; ++v) {
      F32 x = load(row + v * kLanes);
      if constexpr (kUpdate) {
        x = multiply_add(splat(key[i]), delta[v], g * x);
        store(row + v * kLanes, x);
      }
      if constexpr (kProducts) {
        key_sums[v] = multiply_add(splat(next_key[i]), x, key_sums[v]);
        query_sums[v] = multiply_add(splat(next_query[i]), x, query_sums[v]);
      }
    }
  };
  int64_t i = 0;
  for (; i + kSums <= size; i += kSums) {
    for (int sum = 0; sum < kSums; ++sum) take(i + sum, keys[sum], queries[sum]);
  }
  for (; i < size; ++i) take(i, keys[0], queries[0]);
  if constexpr (kProducts) {
    for (int v = 0; v < kVectors; ++v) {
      products->key[v] = keys[0][v];
      products->query[v] = queries[0][v];
      for (int sum = 1; sum < kSums; ++sum) {
        products->key[v] = products->key[v] + keys[sum][v];
        products->query[v] = products->query[v] + queries[sum][v];
      }
    }
  }
}

void copy_columns(const float* from, int64_t from_stride, float* to, int64_t to_stride,
                  int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i, from += from_stride, to += to_stride) {
    if (columns == kStateColumns) {
      for (int v = 0; v < kVectors; ++v) store(to + v * kLanes, load(from + v * kLanes));
    } else {
      for (int64_t c = 0; c < columns; ++c) to[c] = from[c];
    }
  }
}

// Columns of a value head from the first-th on.
void run_columns(const DeltaRuleParams& p, const StateSegment& segment, int64_t head, int64_t first,
                 float* s) {
  const MixerConfig& m = p.config;
  const int64_t size = m.key_size, key_head = head / (m.value_heads / m.key_heads);
  const int64_t left = m.value_size - first;
  const int64_t columns = left < kStateColumns ? left : kStateColumns;
  const int64_t place = head * size * m.value_size + first;
  if (columns < kStateColumns || segment.source < 0) {
    for (int64_t i = 0; i < size * kStateColumns; ++i) s[i] = 0.0f;
  }
  if (segment.source >= 0) {
    copy_columns(p.state.states + segment.source * p.state.slot_stride + place, m.value_size, s,
                 kStateColumns, size, columns);
  }
  const StateTarget* target = segment.targets;
  const StateTarget* const last_target = target + segment.num_targets;
  Products products;
  for (int64_t t = 0; t < segment.count; ++t) {
    const int64_t row = segment.row + t;
    const float* const key = p.keys(row) + key_head * size;
    if (t == 0) {
      pass<false, true>(s, size, 0.0f, nullptr, nullptr, key, p.queries(row) + key_head * size,
                        &products);
    }
    const float* const gates = p.gates + row * p.gate_stride();
    const float decay = gates[head];
    const F32 beta = splat(gates[m.value_heads + head]), g = splat(decay);
    const F32 key_query = splat(gates[2 * m.value_heads + key_head]);
    const float* const values = p.values(row) + head * m.value_size + first;
    float* const out = p.out + row * p.out_stride + head * m.value_size + first;
    F32 delta[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const int64_t n = columns - v * kLanes;
      if (n <= 0) {
        delta[v] = splat(0.0f);
        continue;
      }
      delta[v] = (read(values + v * kLanes, n) - g * products.key[v]) * beta;
      write(out + v * kLanes, multiply_add(key_query, delta[v], g * products.query[v]), n);
    }
    if (t + 1 < segment.count) {
      pass<true, true>(s, size, decay, key, delta, p.keys(row + 1) + key_head * size,
                       p.queries(row + 1) + key_head * size, &products);
    } else {
      pass<true, false>(s, size, decay, key, delta, nullptr, nullptr, nullptr);
    }
    for (; target != last_target && target->token == t; ++target) {
      copy_columns(s, kStateColumns, p.state.states + target->slot * p.state.slot_stride + place,
                   m.value_size, size, columns);
    }
  }
}

}  // namespace

void delta_rule_keys(const DeltaRuleParams& p, int64_t begin, int64_t end) {
  const MixerConfig& m = p.config;
  const int64_t size = m.key_size;
  const float query_scale = 1.0f / __builtin_sqrtf(static_cast<float>(size));
  for (int64_t row = begin; row < end; ++row) {
    float* const queries = p.rows + row * p.row_stride;
    for (int64_t head = 0; head < m.key_heads; ++head) {
      float* const query = queries + head * size;
      float* const key = query + m.key_heads * size;
      scale(query, query_scale / __builtin_sqrtf(dot(query, query, size) + kLengthEpsilon), size);
      scale(key, 1.0f / __builtin_sqrtf(dot(key, key, size) + kLengthEpsilon), size);
      p.gates[row * p.gate_stride() + 2 * m.value_heads + head] = dot(query, key, size);
    }
  }
}

void delta_rule(const DeltaRuleParams& p, int64_t begin, int64_t end) {
  const MixerConfig& m = p.config;
  const int64_t parts = (m.value_size + kStateColumns - 1) / kStateColumns;
  alignas(64) float s[kMostHeadSize * kStateColumns];
  for (int64_t part = begin; part < end; ++part) {
    for (int64_t i = 0; i < p.state.count; ++i) {
      run_columns(p, p.state.segments[i], part / parts, part % parts * kStateColumns, s);
    }
  }
}

void delta_rule_norm(const DeltaRuleParams& p, int64_t begin, int64_t end) {
  const MixerConfig& m = p.config;
  const int64_t size = m.value_size;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t head = 0; head < m.value_heads; ++head) {
      float* const out = p.out + row * p.out_stride + head * size;
      const float* const gate = p.output_gates(row) + head * size;
      const float mean = dot(out, out, size) / static_cast<float>(size);
      const F32 factor = splat(1.0f / __builtin_sqrtf(mean + p.norm_epsilon));
      for (int64_t i = 0; i < size; i += kLanes) {
        const int64_t n = size - i;
        const F32 z = read(gate + i, n);
        const F32 open = silu(z);
        write(out + i, read(out + i, n) * factor * read(p.gamma + i, n) * open, n);
      }
    }
  }
}

}  // namespace lmdecode::LMD_SIMD::decoder
