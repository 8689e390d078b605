#include "decoder/decoder_forward.h"

#include "common/parallel_rows.h"
#include "common/split_memory.h"
#include "decoder/decoder_tuning.h"
#include "decoder/step_layer_attention.h"

namespace lmdecode::decoder {

DecoderForward::DecoderForward(const DecoderConfig& config, const DecoderWeights& weights,
                               const DecoderCaches& caches, int64_t max_rows, int64_t max_logits,
                               void* memory)
    : config_(config), weights_(weights), caches_(caches) {
  split(memory, max_rows, max_logits);
  clear();
}

size_t DecoderForward::split(void* memory, int64_t max_rows, int64_t max_logits) {
  SplitMemory block(memory);
  block.take(&cache_rows_, max_rows);
  block.take(&positions_, max_rows);
  block.take(&requests_, max_rows);
  block.take(&run_begins_, max_rows + 1);
  block.take(&tokens_, max_rows);
  block.take(&x_, max_rows * config_.model_size);
  block.take(&logits_, max_logits * config_.vocab);
  unsigned char* layer = nullptr;
  block.take(&layer,
             static_cast<int64_t>(split_layer_buffers(config_, max_rows, nullptr, &buffers_)));
  if (layer != nullptr) split_layer_buffers(config_, max_rows, layer, &buffers_);
  return block.used();
}

size_t DecoderForward::bytes(const DecoderConfig& config, int64_t max_rows, int64_t max_logits) {
  const DecoderWeights weights;
  const DecoderCaches caches;
  return DecoderForward(config, weights, caches, max_rows, max_logits, nullptr)
      .split(nullptr, max_rows, max_logits);
}

void DecoderForward::add(int64_t cache_row, int64_t position, int64_t request, int64_t token) {
  const int64_t row = rows_.count++;
  cache_rows_[row] = static_cast<int32_t>(cache_row);
  positions_[row] = static_cast<int32_t>(position);
  requests_[row] = static_cast<int32_t>(request);
  tokens_[row] = token;
  caches_.table[cache_row * caches_.capacity + position] = static_cast<int32_t>(cache_row);
  if (row == 0 || requests_[row - 1] != requests_[row]) {
    run_begins_[rows_.num_runs++] = static_cast<int32_t>(row);
  }
  run_begins_[rows_.num_runs] = static_cast<int32_t>(row + 1);
}

void DecoderForward::embed() {
  const int64_t size = config_.model_size;
  const float scale = config_.embedding_scale;
  const auto embed_row = [&](int64_t row) {
    const float* const token = weights_.embedding + tokens_[row] * size;
    float* const x = x_ + row * size;
    if (weights_.positions == nullptr || tokens_[row] == config_.unplaced_token) {
      for (int64_t i = 0; i < size; ++i) x[i] = token[i] * scale;
      return;
    }
    const int64_t at = positions_[row] + config_.position_offset;
    const float* const position = weights_.positions + at * size;
    for (int64_t i = 0; i < size; ++i) x[i] = token[i] * scale + position[i];
  };
  const double nanoseconds = tuning::kNanosecondsPerCopy * static_cast<double>(size);
  parallel_rows(rows_.count, nanoseconds, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) embed_row(row);
  });
  if (weights_.embedding_norm.gamma != nullptr) {
    apply_norm(config_, weights_.embedding_norm, x_, x_, rows_.count);
  }
}

void DecoderForward::run(bool to_logits) {
  embed();
  const int64_t heads = config_.heads * padded_to_block(config_.head_size);
  const int64_t self_layer = caches_.rows * heads * caches_.capacity;
  const int64_t cross_layer = caches_.requests * heads * caches_.source;
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    const LayerCaches caches{caches_.capacity,
                             caches_.self_keys + layer * self_layer,
                             caches_.self_values + layer * self_layer,
                             caches_.table,
                             caches_.source,
                             caches_.cross_keys + layer * cross_layer,
                             caches_.cross_values + layer * cross_layer,
                             caches_.memory_lengths};
    const float* bias = weights_.relative_bias;
    if (weights_.has_bias_of_layers) bias += layer * config_.heads * weights_.num_distances;
    const StepLayerAttention attention(config_, rows_, caches, bias, weights_.num_distances);
    decoder_layer_cpu(config_, weights_.layers[layer], attention, buffers_, rows_.count, x_);
  }
  if (!to_logits) return;
  const float* last = x_;
  if (weights_.final_norm.gamma != nullptr) {
    apply_norm(config_, weights_.final_norm, x_, buffers_.normed, rows_.count);
    last = buffers_.normed;
  }
  linear::LinearOutput output;
  output.y = logits_;
  apply_linear(weights_.logits, last, rows_.count, buffers_.linear_input, output);
}

}  // namespace lmdecode::decoder
