// Attention over caches with a row for each beam, read through the beam indirection.
#pragma once

#include "decoder/decoder_layer.h"
#include "decoder/step_attention.h"

namespace lmdecode::decoder {

class StepLayerAttention final : public LayerAttention {
 public:
  // rows: whose keys and values have been written for every earlier position. relative_bias: see
  // SelfAttentionParams.
  StepLayerAttention(const DecoderConfig& config, const StepRows& rows, const LayerCaches& caches,
                     const float* relative_bias, int64_t num_distances)
      : shape_{config.heads, config.head_size, config.attention_scale, config.denominator_epsilon},
        rows_(rows),
        caches_(caches),
        relative_bias_(relative_bias),
        num_distances_(num_distances) {}

  int64_t self(float* qkv, float* out, float*) const override {
    SelfAttentionParams self;
    self.shape = shape_;
    self.rows = rows_;
    self.capacity = caches_.capacity;
    self.qkv = qkv;
    self.out = out;
    self.keys = caches_.self_keys;
    self.values = caches_.self_values;
    self.table = caches_.table;
    self.bias = relative_bias_;
    self.bias_stride = num_distances_;
    self_attention_step_cpu(self);
    return rows_.count;
  }

  void cross(const float* queries, float* out) const override {
    CrossAttentionParams cross;
    cross.shape = shape_;
    cross.rows = rows_;
    cross.source = caches_.source;
    cross.queries = queries;
    cross.out = out;
    cross.keys = caches_.cross_keys;
    cross.values = caches_.cross_values;
    cross.lengths = caches_.memory_lengths;
    cross_attention_step_cpu(cross);
  }

 private:
  const AttentionShape shape_;
  const StepRows& rows_;
  const LayerCaches& caches_;
  const float* const relative_bias_;
  const int64_t num_distances_;
};

}  // namespace lmdecode::decoder
