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

// Most positions read at a time, of one memory or of several short ones.
int64_t rows_together(const ReadMemoryParams& p) {
  return std::min(std::max(p.source, tuning::kReadMemoryRows), p.count * p.source);
}

AttentionShape shape_of(const DecoderConfig& config) {
  return {config.heads, config.head_size, 1.0f, 0.0f};
}

struct Workspace {
  float* memory;          // [rows_together, memory_size]
  float* key_value;       // [rows_together, 2, heads, head_size]
  unsigned char* linear;  // of apply_linear

  // With null for the memory it only counts. Returns the bytes.
  size_t split(const ReadMemoryParams& p, void* block) {
    const int64_t rows = rows_together(p);
    SplitMemory parts(block);
    parts.take(&memory, rows * p.config.memory_size);
    parts.take(&key_value, rows * 2 * shape_of(p.config).size());
    parts.take(&linear, static_cast<int64_t>(input_bytes(p.config, p.config.memory_size, rows)));
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
  const int64_t most = rows_together(p), memory_size = p.config.memory_size;
  const int64_t area = shape.heads * shape.padded_head() * p.cache_source;  // of a request
  const auto length = [&](int64_t i) { return p.lengths[i * p.length_stride]; };
  const auto request = [&](int64_t i) { return p.requests[i * p.request_stride]; };
  for (int64_t begin = 0; begin < p.count;) {
    // Gathers the valid rows of as many memories as fit. A single memory is read in place.
    int64_t end = begin, rows = 0;
    while (end < p.count && rows + length(end) <= most) rows += length(end++);
    const float* memory = p.memory + begin * p.source * memory_size;
    if (end - begin > 1) {
      float* to = workspace.memory;
      for (int64_t i = begin; i < end; ++i) {
        to = std::copy_n(p.memory + i * p.source * memory_size, length(i) * memory_size, to);
      }
      memory = workspace.memory;
    }
    for (int64_t layer = 0; layer < p.config.layers; ++layer) {
      if (rows > 0) {
        linear::LinearOutput output;
        output.y = workspace.key_value;
        apply_linear(p.layers[layer].cross_key_value, memory, rows, workspace.linear, output);
      }
      const float* key_value = workspace.key_value;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t at = layer * p.cache_requests + request(i);
        write_cross_cache_cpu({shape, p.cache_source, length(i), key_value,
                               p.cross_keys + at * area, p.cross_values + at * area});
        key_value += length(i) * 2 * shape.size();
      }
    }
    begin = end;
  }
  for (int64_t i = 0; i < p.count; ++i) {
    p.memory_lengths[request(i)] = length(i);
    p.cached_lengths[request(i)] = 0;
  }
}

}  // namespace lmdecode::decoder
