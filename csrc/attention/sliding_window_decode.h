// sliding_window_decode: sliding_window_attention for one or a few queries against a cache.
// docs/reference/attention.md is the user's page.
//
// The same function of the same arguments (sliding_window_attention.h), without attn_mask and
// cu_seqlens. Keys and values are read once, in place, for all query heads of their KV head. The
// keys of a sequence are split into parts at fixed positions, and the parts of a row are added in
// order: a row's result is bitwise a function of its own query and sequence. It is not bitwise
// equal to the result of sliding_window_attention.
#pragma once

#include <cstddef>

#include "attention/attention_tuning.h"
#include "attention/sliding_window_attention.h"
#include "common/split_memory.h"
#include "simd/kernel_levels.h"

namespace lmdecode::attention {

// Keys [begin, end) of a sequence for one KV head, and the slot of their partial result.
struct DecodePart {
  int64_t sequence;
  int64_t kv_head;
  KeyRange keys;
  int64_t slot;
};

// Partial results of the parts, by slot and row. Rows are the query heads of the KV head, token by
// token.
struct DecodePartials {
  float* out;       // [slots, rows, out_stride], not divided by the sum
  float* row_max;   // [slots, rows], exponents of two
  double* row_sum;  // [slots, rows]
  int64_t rows;
  int64_t out_stride;
  // Where the first tile asks for what comes, with the same bits. True: to the first cache; else to
  // the second.
  bool to_first_cache = false;
};

// The slots of one KV head of one sequence.
struct DecodeHead {
  int64_t sequence;
  int64_t kv_head;
  int64_t first_slot;
  int64_t slots;
};

// Scratch of a thread: queries, scores and weights of a part, the softmax, and a block of keys or
// values whose layout the kernel cannot read.
struct DecodeWorkspace {
  float* queries;           // [rows, padded head_size], or bfloat16, of at least 16 rows
  float* scores;            // [rows, kSplitKeys]
  uint32_t* weights;        // [rows, kSplitKeys / 2], where weights are bfloat16
  float* terms;             // [kSplitKeys]
  float* row_sum;           // [rows, 16]
  int64_t* row_begin;       // [rows]
  int64_t* row_end;         // [rows]
  float* keys;              // [32, padded head_size]
  float* values;            // [32, padded value_size]
  const void** token_rows;  // [64]: rows of a block, then of one that is read later
};

// Several tiles of the matrix units have 16 rows each.
constexpr int64_t padded_decode_rows(int64_t rows) {
  return rows <= 16 ? (rows + 3) / 4 * 4 : (rows + 15) / 16 * 16;
}
constexpr int64_t padded_decode_size(int64_t size) { return (size + 31) / 32 * 32; }

inline size_t split_decode_workspace(void* memory, int64_t rows, int64_t head_size,
                                     int64_t value_size, DecodeWorkspace* w) {
  SplitMemory split(memory);
  rows = padded_decode_rows(rows);
  split.take(&w->queries, (rows < 8 ? 8 : rows) * padded_decode_size(head_size));
  split.take(&w->scores, rows * tuning::kSplitKeys);
  split.take(&w->weights, rows * tuning::kSplitKeys / 2);
  split.take(&w->terms, tuning::kSplitKeys);
  split.take(&w->row_sum, rows * 16);
  split.take(&w->row_begin, rows);
  split.take(&w->row_end, rows);
  split.take(&w->keys, 32 * padded_decode_size(head_size));
  split.take(&w->values, 32 * padded_decode_size(value_size));
  split.take(&w->token_rows, 64);
  return split.used();
}

inline size_t decode_workspace_bytes(int64_t rows, int64_t head_size, int64_t value_size) {
  DecodeWorkspace w;
  return split_decode_workspace(nullptr, rows, head_size, value_size, &w);
}

void sliding_window_decode_cpu(const SlidingWindowAttentionParams& params);

// Floats of the workspace that sliding_window_decode_cuda takes.
int64_t sliding_window_decode_cuda_workspace(const SlidingWindowAttentionParams& params);
void sliding_window_decode_cuda(const SlidingWindowAttentionParams& params, float* workspace,
                                void* stream);

}  // namespace lmdecode::attention

// Parts of keys, then heads of parts.
LMD_DECLARE_KERNELS(attention,
                    void sliding_window_decode_parts(const SlidingWindowAttentionParams& params,
                                                     const DecodePart* parts,
                                                     const DecodePartials& partials, int64_t begin,
                                                     int64_t end, void* workspace);
                    void sliding_window_decode_heads(const SlidingWindowAttentionParams& params,
                                                     const DecodeHead* heads,
                                                     const DecodePartials& partials, int64_t begin,
                                                     int64_t end);)
