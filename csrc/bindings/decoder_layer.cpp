// decoder_layer, on CPU tensors alone.
#include "decoder/decoder_layer.h"

#include <algorithm>
#include <utility>

#include "bindings/decoder_checks.h"
#include "decoder/step_layer_attention.h"

namespace lmdecode::decoder {
namespace {

constexpr const char* kLayerOp = "decoder_layer";

// Two rows that write the same place would race.
void check_places(const StepRows& rows, int64_t capacity) {
  std::vector<std::pair<int64_t, int64_t>> places;
  for (int64_t row = 0; row < rows.count; ++row) {
    places.emplace_back(rows.cache_rows[row] * capacity + rows.positions[row], row);
  }
  std::sort(places.begin(), places.end());
  for (size_t i = 1; i < places.size(); ++i) {
    if (places[i].first != places[i - 1].first) continue;
    const int64_t row = places[i].second;
    fail(kLayerOp, "cache_rows[", row, "] is ", rows.cache_rows[row], " once more, at position ",
         rows.positions[row], "; expected each place once");
  }
}

// One layer on x [rows, model_size]; cache_rows, positions and requests [rows] int32.
Tensor decoder_layer(const Tensor& x, const Tensor& weights, const Tensor& relative_bias,
                     const Tensors& caches, const Tensor& cache_rows, const Tensor& positions,
                     const Tensor& requests) {
  const char* const op = kLayerOp;
  const auto& model = checked_model<DecoderModel>(op, weights);
  const LayerWeights& layer = model.layers[0];
  DecoderConfig c = model.config;
  c.layers = 1;
  const CacheTensors cache(op, caches, c);
  check_rank(op, "x", x, 2, "[rows, model_size]");
  check_dtype(op, "x", x, ScalarType::Float);
  const int64_t rows = x.size(0);
  if (x.size(1) != c.model_size || !x.is_contiguous()) {
    fail(op, "x has shape ", shape_text(x), "; expected [rows, ", c.model_size, "], contiguous");
  }
  const Arguments arguments(op);
  StepRows step;
  step.count = rows;
  step.cache_rows = arguments.contiguous<const int32_t>("cache_rows", cache_rows, {rows});
  step.positions = arguments.contiguous<const int32_t>("positions", positions, {rows});
  step.requests = arguments.contiguous<const int32_t>("requests", requests, {rows});
  const float* const bias =
      relative_bias.numel() == 0
          ? nullptr
          : arguments.contiguous<const float>("relative_bias", relative_bias, {c.heads, -1});
  const int64_t distances = bias == nullptr ? 0 : relative_bias.size(1);
  for (int64_t row = 0; row < rows; ++row) {
    check_number(op, "cache_rows", row, step.cache_rows[row], 0, cache.caches.rows - 1);
    check_number(op, "positions", row, step.positions[row], 0, cache.caches.capacity - 1);
    check_number(op, "requests", row, step.requests[row], 0, cache.caches.requests - 1);
    check_number(op, "caches.memory_lengths", step.requests[row],
                 cache.memory_lengths[step.requests[row]], 0, cache.caches.source);
    const int32_t* const table = cache.caches.table + step.cache_rows[row] * cache.caches.capacity;
    for (int64_t i = 0; i <= step.positions[row]; ++i) {
      check_number(op, "caches.table", step.cache_rows[row], table[i], 0, cache.caches.rows - 1);
    }
    if (bias != nullptr && step.positions[row] >= distances) {
      fail(op, "relative_bias has ", distances, " distances; expected at least ",
           step.positions[row] + 1);
    }
  }
  check_places(step, cache.caches.capacity);
  std::vector<int32_t> run_begins;
  for (int64_t row = 0; row < rows; ++row) {
    if (row == 0 || step.requests[row] != step.requests[row - 1]) {
      run_begins.push_back(static_cast<int32_t>(row));
    }
  }
  step.num_runs = static_cast<int64_t>(run_begins.size());
  run_begins.push_back(static_cast<int32_t>(rows));
  step.run_begins = run_begins.data();
  LayerBuffers buffers;
  const size_t bytes = split_layer_buffers(c, rows, nullptr, &buffers);
  Tensor memory = new_tensor(x, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
  split_layer_buffers(c, rows, memory.mutable_data_ptr(), &buffers);
  Tensor y = new_tensor(x, {rows, c.model_size}, ScalarType::Float);
  float* const to = static_cast<float*>(y.mutable_data_ptr());
  std::copy_n(static_cast<const float*>(x.const_data_ptr()), rows * c.model_size, to);
  const LayerCaches layer_caches{cache.caches.capacity,    cache.caches.self_keys,
                                 cache.caches.self_values, cache.caches.table,
                                 cache.caches.source,      cache.cross_keys,
                                 cache.cross_values,       cache.memory_lengths};
  if (rows > 0) {
    const StepLayerAttention attention(c, step, layer_caches, bias, distances);
    decoder_layer_cpu(c, layer, attention, buffers, rows, to);
  }
  return y;
}

}  // namespace
}  // namespace lmdecode::decoder

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("decoder_layer", TORCH_BOX(&lmdecode::decoder::decoder_layer));
}
