// The scratch memory of a thread that works on a tile of sliding_window_attention.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/attention_tuning.h"
#include "attention/key_range.h"
#include "common/split_memory.h"

namespace lmdecode::attention {

struct AttentionWorkspace {
  float* queries;           // [rows, depth]
  float* keys;              // panels of a step's keys
  float* values;            // panels of a step's values
  float* out;               // [rows, padded value_size]
  float* scores;            // [strip, kStepKeys]
  uint32_t* weights;        // [strip, kStepKeys / 2], where weights are bfloat16
  float* terms;             // [strip, kStepKeys]
  float* row_max;           // [rows]
  float* row_sum;           // [rows, 16]
  int64_t* row_begin;       // [rows]
  int64_t* row_end;         // [rows]
  const void** key_rows;    // [kStepKeys]: where the keys of a step begin
  const void** value_rows;  // [kStepKeys]
};

// Rows are padded to whole strips.
constexpr int64_t kStripRows = 6;
// Sizes as the kernels pad them.
constexpr int64_t padded_size(int64_t size) { return (size + 63) / 64 * 64; }

// Deals out `memory`, of attention_workspace_bytes(); with null it only counts.
inline size_t split_attention_workspace(void* memory, int64_t rows, int64_t head_size,
                                        int64_t value_size, AttentionWorkspace* w) {
  SplitMemory split(memory);
  constexpr int64_t kStep = tuning::kStepKeys;
  rows += kStripRows - 1;
  split.take(&w->queries, rows * padded_size(head_size));
  split.take(&w->keys, kStep * head_size);
  split.take(&w->values, kStep * padded_size(value_size));
  split.take(&w->out, rows * padded_size(value_size));
  split.take(&w->scores, kStripRows * kStep);
  split.take(&w->weights, kStripRows * kStep / 2);
  split.take(&w->terms, kStripRows * kStep);
  split.take(&w->row_max, rows);
  split.take(&w->row_sum, rows * 16);
  split.take(&w->row_begin, rows);
  split.take(&w->row_end, rows);
  split.take(&w->key_rows, kStep);
  split.take(&w->value_rows, kStep);
  return split.used();
}

inline size_t attention_workspace_bytes(int64_t rows, int64_t head_size, int64_t value_size) {
  AttentionWorkspace w;
  return split_attention_workspace(nullptr, rows, head_size, value_size, &w);
}

// ---- by tiles of the matrix units

// Rows of a strip, and keys of a block.
constexpr int64_t kMatrixStripRows = 32, kMatrixBlockKeys = 64;

struct alignas(64) MatrixAttentionStrip {
  // See MatrixWeights.
  float sums[kMatrixStripRows * 16], exact_sums[kMatrixStripRows * 16];
  float maximum[kMatrixStripRows], shift[kMatrixStripRows], shares[kMatrixStripRows];
  KeyRange range[kMatrixStripRows];  // keys that a row sees
  KeyRange seen, seen_by_all;        // by some row, by every row
  int64_t first_row, rows;
};

struct MatrixAttentionWorkspace {
  MatrixAttentionStrip* strips;
  uint32_t* queries;  // [strips, 32, pairs of the head]
  float* out;         // tiles [strips, columns, 2]
  uint32_t* keys;     // tiles of a span
  uint32_t* values;
  float* scores;  // [2, 32, 64]: of a block, then its weights
  float* terms;   // [2, 32, 64]
  float* row;     // of the output
};

// In tiles of 16 rows of 64 bytes.
struct MatrixAttentionSizes {
  int64_t depth, columns;  // of queries and keys along the head; of values

  static MatrixAttentionSizes of(int64_t head_size, int64_t value_size) {
    return {(head_size + 31) / 32, (value_size + 15) / 16};
  }
  int64_t span_keys() const {
    const int64_t keys = tuning::kMatrixSpanBytes / (64 * depth + 32 * columns);
    return max_of(keys / kMatrixBlockKeys, 1) * kMatrixBlockKeys;
  }
  // Deals out `memory`; with null it only counts.
  size_t split(void* memory, int64_t rows, MatrixAttentionWorkspace* w) const {
    constexpr int64_t kTileElements = 256, kBlock = kMatrixStripRows * kMatrixBlockKeys;
    const int64_t strips = (rows + kMatrixStripRows - 1) / kMatrixStripRows;
    SplitMemory split(memory);
    split.take(&w->strips, strips);
    split.take(&w->queries, strips * 2 * depth * kTileElements);
    split.take(&w->out, strips * 2 * columns * kTileElements);
    split.take(&w->keys, span_keys() / 16 * depth * kTileElements);
    split.take(&w->values, span_keys() / 32 * columns * kTileElements);
    split.take(&w->scores, 2 * kBlock);
    split.take(&w->terms, 2 * kBlock);
    split.take(&w->row, 16 * columns);
    return split.used();
  }
};

inline size_t matrix_attention_bytes(int64_t rows, int64_t head_size, int64_t value_size) {
  MatrixAttentionWorkspace w;
  return MatrixAttentionSizes::of(head_size, value_size).split(nullptr, rows, &w);
}

}  // namespace lmdecode::attention
