// Compiled once for each CPU capability, with LMD_SIMD naming it.
#include "attention/attention_vec.h"
#include "decoder/step_attention.h"

namespace lmdecode::LMD_SIMD::decoder {

using namespace lmdecode::decoder;

namespace {

// size: a multiple of kAttentionBlock
float dot_product(const float* a, const float* b, int64_t size) {
  F32 sum[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  int64_t i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      sum[j] = accumulate(load(a + i + j * kLanes), load(b + i + j * kLanes), sum[j]);
    }
  }
  for (; i < size; i += kLanes) sum[0] = accumulate(load(a + i), load(b + i), sum[0]);
  return reduce_add((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// Turns scores[0 .. size) into undivided weights; returns the factor that divides them. Pads with 0
// up to a whole block: there is room for it.
float softmax_weights(float* scores, int64_t size, float denominator_epsilon) {
  const int64_t padded = padded_to_block(size);
  for (int64_t i = size; i < padded; ++i) scores[i] = minus_infinity();
  F32 top = splat(minus_infinity());
  for (int64_t i = 0; i < padded; i += kLanes) top = max(load(scores + i), top);
  const float largest = reduce_max(top);
  // Where all scores are -inf, or NaN, these stay.
  const F32 shift = splat(largest > minus_infinity() ? largest : 0.0f);
  const F32 factor = splat(static_cast<float>(kLog2E));
  constexpr int kParts = kAttentionBlock / kLanes;
  F32 sum[kParts];
  for (int j = 0; j < kParts; ++j) sum[j] = splat(0.0f);
  for (int64_t i = 0; i < padded; i += kAttentionBlock) {
    for (int j = 0; j < kParts; ++j) {
      const F32 weight = exp2_of((load(scores + i + j * kLanes) - shift) * factor);
      store(scores + i + j * kLanes, weight);
      sum[j] = sum[j] + weight;
    }
  }
  F32 all = sum[0];
  for (int j = 1; j < kParts; ++j) all = all + sum[j];
  const float divisor = reduce_add(all) + denominator_epsilon;
  return divisor == 0.0f ? 0.0f : 1.0f / divisor;
}

// to[0 .. size) = from * factor, and 0 up to the next multiple of the block.
void copy_padded(float* to, const float* from, int64_t size, float factor) {
  for (int64_t i = 0; i < size; ++i) to[i] = from[i] * factor;
  for (int64_t i = size; i < padded_to_block(size); ++i) to[i] = 0.0f;
}

// Scratch of a thread; `memory` is step_attention_scratch() floats, aligned to 64.
class StepAttention {
 public:
  StepAttention(const AttentionShape& shape, int64_t positions, void* memory)
      : shape_(shape),
        head_(shape.padded_head()),
        positions_(padded_to_block(positions)),
        scores_(static_cast<float*>(memory)),
        queries_(scores_ + kRows * positions_),
        sums_(queries_ + kRows * head_) {}

  static constexpr int kRows = 4;  // that read keys and values together
  static int64_t scratch_floats(const AttentionShape& shape, int64_t positions) {
    return kRows * (padded_to_block(positions) + 2 * shape.padded_head());
  }

  void self(const SelfAttentionParams& p, int64_t row, int64_t head) const {
    const int64_t cache_row = p.rows.cache_rows[row], position = p.rows.positions[row];
    const int32_t* const table = p.table + cache_row * p.capacity;
    const int64_t count = position + 1, size = shape_.size();
    const float* const q = p.qkv + row * 3 * size + head * shape_.head_size;
    copy_padded(queries_, q, shape_.head_size, shape_.scale);
    const auto at = [&](const float* cache, int64_t t) {
      return cache + ((table[t] * shape_.heads + head) * p.capacity + t) * head_;
    };
    for (int64_t t = 0; t < count; ++t) scores_[t] = dot_product(queries_, at(p.keys, t), head_);
    if (p.bias != nullptr) {
      const float* const bias = p.bias + head * p.bias_stride + position;
      for (int64_t t = 0; t < count; ++t) scores_[t] += bias[-t];
    }
    const float factor = softmax_weights(scores_, count, shape_.denominator_epsilon);
    each_part_of_head([&]<int V>(int64_t d) {
      F32 sum[V];
      for (int j = 0; j < V; ++j) sum[j] = splat(0.0f);
      for (int64_t t = 0; t < count; ++t) {
        const F32 weight = splat(scores_[t]);
        const float* const value = at(p.values, t) + d;
        for (int j = 0; j < V; ++j) sum[j] = accumulate(weight, load(value + j * kLanes), sum[j]);
      }
      for (int j = 0; j < V; ++j) store(sums_ + d + j * kLanes, sum[j]);
    });
    put(p.out, row, head, 0, factor);
  }

  // Rows [begin, end), all of one request.
  void cross(const CrossAttentionParams& p, int64_t begin, int64_t end, int64_t head) const {
    for (; begin < end; begin += kRows) {
      switch (end - begin) {
        case 1:
          cross_rows<1>(p, begin, head);
          break;
        case 2:
          cross_rows<2>(p, begin, head);
          break;
        case 3:
          cross_rows<3>(p, begin, head);
          break;
        default:
          cross_rows<4>(p, begin, head);
      }
    }
  }

 private:
  static constexpr int kParts = kAttentionBlock / kLanes;

  // Calls body<V>(d) for elements [d, d + V * kLanes) of a head: sums of several vectors at a time,
  // since additions to one follow each other at their latency.
  template <class Body>
  void each_part_of_head(const Body& body) const {
    int64_t d = 0;
    for (; d + 4 * kAttentionBlock <= head_; d += 4 * kAttentionBlock) {
      body.template operator()<4 * kParts>(d);
    }
    for (; d + 2 * kAttentionBlock <= head_; d += 2 * kAttentionBlock) {
      body.template operator()<2 * kParts>(d);
    }
    for (; d < head_; d += kAttentionBlock) body.template operator()<kParts>(d);
  }

  template <int R>
  void cross_rows(const CrossAttentionParams& p, int64_t row, int64_t head) const {
    const int64_t request = p.rows.requests[row], count = p.lengths[request];
    const int64_t cache = (request * shape_.heads + head) * p.source * head_;
    const float* const keys = p.keys + cache;
    const float* const values = p.values + cache;
    for (int r = 0; r < R; ++r) {
      copy_padded(queries_ + r * head_,
                  p.queries + (row + r) * shape_.size() + head * shape_.head_size, shape_.head_size,
                  shape_.scale);
    }
    int64_t s = 0;
    for (; s + 2 * kAttentionBlock <= padded_to_block(count); s += 2 * kAttentionBlock) {
      cross_scores<R, 2 * kParts>(keys + s, p.source, s);
    }
    for (; s < count; s += kAttentionBlock) cross_scores<R, kParts>(keys + s, p.source, s);
    float factor[R];
    for (int r = 0; r < R; ++r) {
      factor[r] = softmax_weights(scores_ + r * positions_, count, shape_.denominator_epsilon);
    }
    each_part_of_head([&]<int V>(int64_t d) { cross_values<R, V>(values + d, count, d); });
    for (int r = 0; r < R; ++r) put(p.out, row + r, head, r, factor[r]);
  }

  // The scores of keys [s, s + V * kLanes), which lie side by side for each element of the head.
  template <int R, int V>
  void cross_scores(const float* keys, int64_t source, int64_t s) const {
    F32 sum[R][V];
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < V; ++j) sum[r][j] = splat(0.0f);
    }
    for (int64_t d = 0; d < shape_.head_size; ++d) {
      F32 key[V];
      for (int j = 0; j < V; ++j) key[j] = load(keys + d * source + j * kLanes);
      for (int r = 0; r < R; ++r) {
        const F32 query = splat(queries_[r * head_ + d]);
        for (int j = 0; j < V; ++j) sum[r][j] = accumulate(query, key[j], sum[r][j]);
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < V; ++j) store(scores_ + r * positions_ + s + j * kLanes, sum[r][j]);
    }
  }

  template <int R, int V>
  void cross_values(const float* values, int64_t count, int64_t d) const {
    F32 sum[R][V];
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < V; ++j) sum[r][j] = splat(0.0f);
    }
    for (int64_t s = 0; s < count; ++s) {
      F32 value[V];
      for (int j = 0; j < V; ++j) value[j] = load(values + s * head_ + j * kLanes);
      for (int r = 0; r < R; ++r) {
        const F32 weight = splat(scores_[r * positions_ + s]);
        for (int j = 0; j < V; ++j) sum[r][j] = accumulate(weight, value[j], sum[r][j]);
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < V; ++j) store(sums_ + r * head_ + d + j * kLanes, sum[r][j]);
    }
  }

  void put(float* out, int64_t row, int64_t head, int64_t r, float factor) const {
    float* const to = out + row * shape_.size() + head * shape_.head_size;
    for (int64_t i = 0; i < shape_.head_size; ++i) to[i] = sums_[r * head_ + i] * factor;
  }

  const AttentionShape& shape_;
  const int64_t head_;
  const int64_t positions_;
  float* const scores_;   // [kRows, positions]
  float* const queries_;  // [kRows, padded head]
  float* const sums_;     // [kRows, padded head]
};

}  // namespace

// Items are rows times heads, the heads of a row side by side.
void self_attention_items(const SelfAttentionParams& params, int64_t begin, int64_t end,
                          void* memory) {
  const StepAttention attention(params.shape, params.capacity, memory);
  for (int64_t item = begin; item < end; ++item) {
    attention.self(params, item / params.shape.heads, item % params.shape.heads);
  }
}

// Items are runs times heads.
void cross_attention_items(const CrossAttentionParams& params, int64_t begin, int64_t end,
                           void* memory) {
  const StepAttention attention(params.shape, params.source, memory);
  const int32_t* const runs = params.rows.run_begins;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t run = item / params.shape.heads;
    attention.cross(params, runs[run], runs[run + 1], item % params.shape.heads);
  }
}

int64_t step_attention_scratch(const AttentionShape& shape, int64_t positions) {
  return StepAttention::scratch_floats(shape, positions);
}

}  // namespace lmdecode::LMD_SIMD::decoder
