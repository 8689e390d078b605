#include <algorithm>

#include "attention/sliding_window_attention.h"
#include "common/float_mode.h"
#include "common/parallel_rows.h"
#include "common/split_memory.h"
#include "decoder/decoder_tuning.h"
#include "decoder/encoder_forward.h"

namespace lmdecode::decoder {
namespace {

// The end of the sequences from `first` on that are computed together.
int64_t group_end(const int64_t* row_begins, int64_t sequences, int64_t first) {
  int64_t end = first + 1;
  while (end < sequences && row_begins[end + 1] - row_begins[first] <= kEncoderRows) ++end;
  return end;
}

struct EncoderWorkspace {
  int64_t* row_begins;  // [rows + 1]: of the group's sequences
  unsigned char* layer;

  size_t split(const DecoderConfig& c, int64_t rows, void* memory, LayerBuffers* buffers) {
    SplitMemory block(memory);
    block.take(&row_begins, rows + 1);
    block.take(&layer, static_cast<int64_t>(split_layer_buffers(c, rows, nullptr, buffers)));
    if (layer != nullptr) split_layer_buffers(c, rows, layer, buffers);
    return block.used();
  }
};

class EncoderAttention final : public LayerAttention {
 public:
  EncoderAttention(const EncoderModel& model, int64_t layer, const int64_t* row_begins,
                   int64_t sequences)
      : model_(model), layer_(layer), row_begins_(row_begins), sequences_(sequences) {}

  int64_t self(float* qkv, float* out, float*) const override {
    const DecoderConfig& c = model_.config;
    const int64_t rows = row_begins_[sequences_];
    attention::SlidingWindowAttentionParams a;
    a.sequences = sequences_;
    a.q_heads = c.heads;
    a.kv_heads = c.kv_heads;
    a.head_size = a.value_size = c.head_size;
    a.ragged_queries = a.ragged_keys = rows;
    a.cu_seqlens_q = a.cu_seqlens_kv = row_begins_;
    a.q = qkv;
    a.k = qkv + c.attention_size();
    a.v = qkv + c.attention_size() + c.key_size();
    a.q_strides = a.k_strides = a.v_strides = {0, c.head_size, c.qkv_size(), 1};
    a.window_right = attention::kUnlimited;
    a.scale = c.attention_scale;
    // Rows of x are rounded as far, or further, where weights are no float32.
    a.may_round_to_bfloat16 =
        model_.layers[layer_].qkv.parts[0].shape.format != linear::LinearFormat::kFloat32;
    if (model_.relative_bias != nullptr) {
      // The table as a mask: a row further on begins one entry further left.
      const int64_t entries = 2 * model_.num_distances - 1;
      const int64_t table = model_.has_bias_of_layers ? layer_ : 0;
      a.mask_type = attention::MaskType::kFloat32;
      a.mask = model_.relative_bias + table * c.heads * entries + model_.num_distances - 1;
      a.mask_strides = {0, entries, -1, 1};
    }
    a.out = out;
    a.out_strides = {0, c.head_size, c.attention_size(), 1};
    sliding_window_attention_cpu(a);
    return rows;
  }

  void cross(const float*, float*) const override {}  // config.memory_size is 0: never called

 private:
  const EncoderModel& model_;
  int64_t layer_;
  const int64_t* row_begins_;
  int64_t sequences_;
};

// x [rows, model_size] of the rows from `first` on.
void embed(const EncoderForwardParams& p, int64_t first, int64_t rows, float* x) {
  const EncoderModel& m = *p.model;
  const int64_t size = m.config.model_size;
  const float scale = m.config.embedding_scale;
  const auto embed_row = [&](int64_t row, float* to) {
    const float* const from =
        p.tokens == nullptr ? p.inputs + row * size : m.embedding + p.tokens[row] * size;
    for (int64_t i = 0; i < size; ++i) to[i] = from[i] * scale;
    if (m.positions == nullptr) return;
    const float* const position =
        m.positions + (p.positions[row] + m.config.position_offset) * size;
    for (int64_t i = 0; i < size; ++i) to[i] += position[i];
  };
  const double nanoseconds = tuning::kNanosecondsPerCopy * static_cast<double>(size);
  parallel_rows(rows, nanoseconds, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) embed_row(first + row, x + row * size);
  });
  if (m.embedding_norm.gamma != nullptr) apply_norm(m.config, m.embedding_norm, x, x, rows);
}

}  // namespace

int64_t encoder_group_rows(const int64_t* row_begins, int64_t sequences) {
  int64_t most = 0;
  for (int64_t first = 0; first < sequences;) {
    const int64_t end = group_end(row_begins, sequences, first);
    most = std::max(most, row_begins[end] - row_begins[first]);
    first = end;
  }
  return most;
}

size_t encoder_workspace_bytes(const DecoderConfig& config, int64_t group_rows) {
  LayerBuffers buffers;
  return EncoderWorkspace{}.split(config, group_rows, nullptr, &buffers);
}

void encoder_forward_cpu(const EncoderForwardParams& p) {
  const ScopedIeeeMode ieee;
  const EncoderModel& m = *p.model;
  const DecoderConfig& c = m.config;
  EncoderWorkspace w;
  LayerBuffers buffers;
  w.split(c, encoder_group_rows(p.row_begins, p.sequences), p.workspace, &buffers);
  for (int64_t first = 0; first < p.sequences;) {
    const int64_t end = group_end(p.row_begins, p.sequences, first);
    const int64_t first_row = p.row_begins[first], rows = p.row_begins[end] - first_row;
    for (int64_t i = first; i <= end; ++i) w.row_begins[i - first] = p.row_begins[i] - first_row;
    float* const x = p.out + first_row * c.model_size;
    embed(p, first_row, rows, x);
    for (int64_t i = 0; i < c.layers; ++i) {
      const EncoderAttention attention(m, i, w.row_begins, end - first);
      decoder_layer_cpu(c, m.layers[i], attention, buffers, rows, x);
    }
    if (m.final_norm.gamma != nullptr) apply_norm(c, m.final_norm, x, x, rows);
    first = end;
  }
}

}  // namespace lmdecode::decoder
