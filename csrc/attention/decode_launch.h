// How sliding_window_decode is laid out on a device: pure arithmetic, no CUDA call.
//
// Work is a part of the keys of a sequence for some rows of a KV head. Parts begin at fixed places,
// and the parts of a row are added in their order.
#pragma once

#include "attention/attention_cuda_tuning.h"
#include "attention/attention_rows.h"

namespace lmdecode::attention {

// Partial results of the parts, by slot and row. A part without keys has row_sum 0 and an undefined
// out.
struct DecodeParts {
  float* out = nullptr;      // [slots, rows, out_stride], not divided by the sum
  float* row_max = nullptr;  // [slots, rows], exponents of two
  float* row_sum = nullptr;  // [slots, rows]
  int64_t rows = 0;          // of a KV head
  int64_t out_stride = 0;
};

struct DecodeLaunch {
  SlidingWindowAttentionParams params;
  DecodeParts partials;
  int64_t split_keys = 0;
  int64_t parts = 0;  // of a sequence
  int tile_rows = 0;
  int64_t tiles = 0;  // of a KV head

  LMD_HOST_DEVICE int64_t slots() const { return params.sequences * params.kv_heads * parts; }
  LMD_HOST_DEVICE int64_t count() const {
    return params.sequences * params.kv_heads * tiles * parts;
  }
  // A part is all there is of its rows: it finishes them.
  LMD_HOST_DEVICE bool is_whole() const { return parts == 1; }
  // Floats of the partials.
  LMD_HOST_DEVICE int64_t workspace() const {
    return is_whole() ? 0 : slots() * partials.rows * (partials.out_stride + 2);
  }
  LMD_HOST_DEVICE int64_t part(int64_t index) const { return index % parts; }
  LMD_HOST_DEVICE int64_t first_row(int64_t index) const {
    return index / parts % tiles * tile_rows;
  }
  LMD_HOST_DEVICE int64_t head(int64_t index) const {
    return index / parts / tiles % params.kv_heads;
  }
  LMD_HOST_DEVICE int64_t sequence(int64_t index) const {
    return index / parts / tiles / params.kv_heads;
  }
  LMD_HOST_DEVICE int64_t slot(int64_t sequence, int64_t head, int64_t part) const {
    return (sequence * params.kv_heads + head) * parts + part;
  }
};

inline DecodeLaunch decode_launch(const SlidingWindowAttentionParams& params, int tile_rows,
                                  int64_t split_keys = cuda_tuning::kSplitKeys) {
  DecodeLaunch launch;
  launch.params = params;
  launch.partials.rows = params.q_len * params.group();
  launch.partials.out_stride = params.value_size;
  launch.split_keys = split_keys;
  launch.parts = most_decode_parts(params, split_keys);
  launch.tile_rows = tile_rows;
  launch.tiles = (launch.partials.rows + tile_rows - 1) / tile_rows;
  return launch;
}

inline void set_decode_workspace(float* memory, DecodeLaunch* launch) {
  if (launch->is_whole()) return;
  DecodeParts& partials = launch->partials;
  const int64_t rows = launch->slots() * partials.rows;
  partials.out = memory;
  partials.row_max = memory + rows * partials.out_stride;
  partials.row_sum = partials.row_max + rows;
}

}  // namespace lmdecode::attention
