// The scratch memory of a thread that works on a tile of sliding_window_attention.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/attention_tuning.h"

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

// The most rows that kernels take together: rows are padded to whole strips of 6 or 16.
constexpr int64_t kMostStripRows = 16;
// Sizes as the kernels pad them.
constexpr int64_t padded_size(int64_t size) { return (size + 63) / 64 * 64; }

// Deals out `memory`, of attention_workspace_bytes(); with null it only counts.
inline size_t split_attention_workspace(void* memory, int64_t rows, int64_t head_size,
                                        int64_t value_size, AttentionWorkspace* w) {
  size_t used = 0;
  const auto take = [&](auto** pointer, int64_t count) {
    using Pointer = decltype(*pointer + 0);
    if (memory != nullptr) {
      *pointer = reinterpret_cast<Pointer>(static_cast<char*>(memory) + used);
    }
    used += (static_cast<size_t>(count) * sizeof(**pointer) + 63) / 64 * 64;
  };
  constexpr int64_t kStep = tuning::kStepKeys;
  rows += kMostStripRows - 1;
  take(&w->queries, rows * padded_size(head_size));
  take(&w->keys, kStep * (head_size < 16 ? 16 : head_size));  // of tiles, 16 pairs or more
  take(&w->values, kStep * padded_size(value_size));
  take(&w->out, rows * padded_size(value_size));
  take(&w->scores, kMostStripRows * kStep);
  take(&w->weights, kMostStripRows * kStep / 2);
  take(&w->terms, kMostStripRows * kStep);
  take(&w->row_max, rows);
  take(&w->row_sum, rows * 16);
  take(&w->row_begin, rows);
  take(&w->row_end, rows);
  take(&w->key_rows, kStep);
  take(&w->value_rows, kStep);
  return used;
}

inline size_t attention_workspace_bytes(int64_t rows, int64_t head_size, int64_t value_size) {
  AttentionWorkspace w;
  return split_attention_workspace(nullptr, rows, head_size, value_size, &w);
}

}  // namespace lmdecode::attention
