// Rows, heads and requests to threads.
#include <string>

#include "common/parallel_rows.h"
#include "decoder/decoder_tuning.h"
#include "decoder/step_attention.h"

namespace lmdecode::decoder {

namespace {

template <class Body>
void run_items(int64_t items, double nanoseconds, const AttentionShape& shape, int64_t positions,
               const Body& body) {
  const auto scratch = LMD_SELECT_KERNEL(decoder, step_attention_scratch);
  const size_t bytes = static_cast<size_t>(scratch(shape, positions)) * sizeof(float);
  parallel_rows("decoding attention", items, nanoseconds, bytes, body);
}

// [size] of each head to where the head begins in the cache, the padding 0.
void write_heads(const AttentionShape& shape, const float* from, float* to, int64_t head_stride) {
  const int64_t padded = shape.padded_head();
  for (int64_t head = 0; head < shape.heads; ++head) {
    float* const at = to + head * head_stride;
    for (int64_t i = 0; i < shape.head_size; ++i) at[i] = from[head * shape.head_size + i];
    for (int64_t i = shape.head_size; i < padded; ++i) at[i] = 0.0f;
  }
}

// Every row, before any reads: rows of one sequence may come in one call.
void write_self_cache(const SelfAttentionParams& p) {
  const int64_t size = p.shape.size(), padded = p.shape.padded_head();
  const double nanoseconds = 2.0 * tuning::kNanosecondsPerCopy * static_cast<double>(size);
  parallel_rows(p.rows.count, nanoseconds, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t first = p.rows.cache_rows[row] * p.shape.heads * p.capacity;
      const int64_t at = (first + p.rows.positions[row]) * padded;
      const float* const qkv = p.qkv + row * 3 * size;
      write_heads(p.shape, qkv + size, p.keys + at, p.capacity * padded);
      write_heads(p.shape, qkv + 2 * size, p.values + at, p.capacity * padded);
    }
  });
}

}  // namespace

void self_attention_step_cpu(const SelfAttentionParams& params) {
  write_self_cache(params);
  int64_t longest = 1;
  for (int64_t row = 0; row < params.rows.count; ++row) {
    const int64_t count = params.rows.positions[row] + 1;
    if (count > longest) longest = count;
  }
  const auto items = LMD_SELECT_KERNEL(decoder, self_attention_items);
  const double elements = 2.0 * static_cast<double>(longest * params.shape.padded_head());
  run_items(params.rows.count * params.shape.heads, elements * tuning::kNanosecondsPerElement,
            params.shape, params.capacity,
            [&](int64_t begin, int64_t end, void* memory) { items(params, begin, end, memory); });
}

void cross_attention_step_cpu(const CrossAttentionParams& params) {
  const auto items = LMD_SELECT_KERNEL(decoder, cross_attention_items);
  const double rows = static_cast<double>(params.rows.count) /
                      static_cast<double>(params.rows.num_runs > 0 ? params.rows.num_runs : 1);
  const double elements =
      2.0 * rows * static_cast<double>(params.source * params.shape.padded_head());
  run_items(params.rows.num_runs * params.shape.heads,
            elements * tuning::kNanosecondsPerElement + 1.0, params.shape, params.source,
            [&](int64_t begin, int64_t end, void* memory) { items(params, begin, end, memory); });
}

void write_cross_cache_cpu(const CrossCacheParams& p) {
  const int64_t padded = p.shape.padded_head(), size = p.shape.size();
  const int64_t area = p.source * padded;
  parallel_for(p.shape.heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) {
      float* const keys = p.keys + head * area;
      float* const values = p.values + head * area;
      for (int64_t i = 0; i < area; ++i) keys[i] = values[i] = 0.0f;
      for (int64_t s = 0; s < p.length; ++s) {
        const float* const key = p.key_value + s * 2 * size + head * p.shape.head_size;
        for (int64_t i = 0; i < p.shape.head_size; ++i) {
          keys[i * p.source + s] = key[i];
          values[s * padded + i] = key[size + i];
        }
      }
    }
  });
}

}  // namespace lmdecode::decoder
