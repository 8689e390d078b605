// Norms of the heads of what the projection of a layer with attention gave.
#pragma once

#include <algorithm>

#include "common/parallel_rows.h"
#include "decoder/causal_forward.h"
#include "decoder/decoder_tuning.h"
#include "linear/norms.h"

namespace lmdecode::decoder {

// gamma [size], or null: 1. first: of heads that begin in rows of this stride.
inline void norm_heads(const DecoderConfig& config, const float* gamma, float* first,
                       int64_t stride, int64_t rows, int64_t all, int64_t size) {
  linear::NormParams params;
  params.x_stride = params.y_stride = stride;
  params.rows = rows;
  params.size = size;
  params.gamma = gamma;
  params.eps = config.norm_epsilon;
  for (int64_t at = 0; at < all; at += size) {
    params.x = params.y = first + at;
    config.norm == NormKind::kLayerNorm ? layer_norm(params) : rms_norm(params);
  }
}

// qkv [rows, layer.weights.qkv_stride]; values that are keys are written there, too.
inline void prepare_heads(const CausalModel& model, const CausalLayer& layer, int64_t rows,
                          float* qkv) {
  const HeadSizes& heads = layer.heads;
  const int64_t stride = layer.weights.qkv_stride, query_size = model.config.heads * heads.size;
  const int64_t key_size = layer.keys == KeySource::kShared ? 0 : heads.key_size();
  float* const keys = qkv + query_size;
  float* const values = keys + key_size;
  if (layer.keys == KeySource::kAreValues) {
    const double row_nanoseconds = tuning::kNanosecondsPerCopy * static_cast<double>(key_size);
    parallel_rows(rows, row_nanoseconds, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        std::copy_n(keys + row * stride, key_size, values + row * stride);
      }
    });
  }
  const auto norm = [&](const float* gamma, float* first, int64_t all, int64_t size) {
    norm_heads(model.config, gamma, first, stride, rows, all, size);
  };
  const auto one = [&](int64_t all) { return model.norms_all_heads ? all : heads.size; };
  if (layer.query_norm != nullptr) norm(layer.query_norm, qkv, query_size, one(query_size));
  if (layer.key_norm != nullptr) norm(layer.key_norm, keys, key_size, one(key_size));
  if (model.norms_values) norm(nullptr, values, key_size, heads.size);
}

}  // namespace lmdecode::decoder
