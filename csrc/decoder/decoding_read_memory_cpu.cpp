// Memories to the cross caches, some at a time, layer after layer.
#include <algorithm>

#include "common/split_memory.h"
#include "decoder/decoder_layer.h"
#include "decoder/decoder_tuning.h"
#include "decoder/decoding_read_memory.h"
#include "decoder/step_attention.h"
#include "linear/packed_linear.h"

namespace lmdecode::decoder {
namespace {

// Memories that are read at a time.
int64_t memories_together(int64_t source) {
  const int64_t rows = tuning::kReadMemoryRows;
  return source > 0 && source < rows ? rows / source : 1;
}

AttentionShape shape_of(const DecoderConfig& config) {
  return {config.heads, config.head_size, 1.0f, 0.0f};
}

struct Workspace {
  float* key_value;       // [memories_together * source, 2, heads, head_size]
  unsigned char* linear;  // of apply_linear

  // With null for the memory it only counts. Returns the bytes.
  size_t split(const ReadMemoryParams& p, void* memory) {
    const int64_t rows = memories_together(p.source) * p.source;
    SplitMemory parts(memory);
    parts.take(&key_value, rows * 2 * shape_of(p.config).size());
    parts.take(&linear, static_cast<int64_t>(
                            linear_input_bytes(p.config.format, p.config.memory_size, rows)));
    return parts.used();
  }
};

}  // namespace

size_t read_memory_workspace_bytes(const ReadMemoryParams& params) {
  Workspace workspace;
  return workspace.split(params, nullptr);
}

void decoding_read_memory_cpu(const ReadMemoryParams& p) {
  Workspace workspace;
  workspace.split(p, p.workspace);
  const AttentionShape shape = shape_of(p.config);
  const int64_t together = memories_together(p.source);
  const int64_t area = shape.heads * shape.padded_head() * p.cache_source;  // of a request
  const auto length = [&](int64_t i) { return p.lengths[i * p.length_stride]; };
  const auto request = [&](int64_t i) { return p.requests[i * p.request_stride]; };
  for (int64_t begin = 0; begin < p.count; begin += together) {
    const int64_t end = std::min(begin + together, p.count);
    for (int64_t layer = 0; layer < p.config.layers; ++layer) {
      if (p.source > 0) {
        linear::LinearOutput output;
        output.y = workspace.key_value;
        apply_linear(p.layers[layer].cross_key_value,
                     p.memory + begin * p.source * p.config.memory_size, (end - begin) * p.source,
                     workspace.linear, output);
      }
      for (int64_t i = begin; i < end; ++i) {
        const int64_t at = layer * p.cache_requests + request(i);
        write_cross_cache_cpu({shape, p.cache_source, length(i),
                               workspace.key_value + (i - begin) * p.source * 2 * shape.size(),
                               p.cross_keys + at * area, p.cross_values + at * area});
      }
    }
  }
  for (int64_t i = 0; i < p.count; ++i) {
    p.memory_lengths[request(i)] = length(i);
    p.cached_lengths[request(i)] = 0;
  }
}

}  // namespace lmdecode::decoder
