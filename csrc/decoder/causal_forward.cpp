#include "decoder/causal_forward.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "attention/sliding_window_decode.h"
#include "common/float_mode.h"
#include "common/parallel_rows.h"
#include "decoder/causal_rows.h"
#include "decoder/causal_workspace.h"
#include "decoder/decoder_tuning.h"
#include "decoder/state_layer.h"
#include "linear/norms.h"

namespace lmdecode::decoder {
namespace {

void project_hidden_rows(const CausalForwardParams& params, const CausalWorkspace& w,
                         const LayerBuffers& buffers, int64_t num_segments, int64_t rows) {
  const DecoderConfig& c = params.model->config;
  const HiddenInput& input = params.model->hidden_input;
  const int64_t size = c.model_size;
  linear::LinearOutput output;
  output.y = w.x;
  apply_norm(c, input.embedding_norm, w.x, buffers.normed, rows);
  apply_linear(input.from_embedding, buffers.normed, rows, buffers.linear_input, output);
  for (int64_t i = 0; i < num_segments; ++i) {
    const Segment& segment = w.segments[i];
    std::copy_n(params.hidden_in + segment.first_token * size, segment.count * size,
                buffers.normed + segment.row * size);
  }
  apply_norm(c, input.hidden_norm, buffers.normed, buffers.normed, rows);
  output.residual = w.x;
  output.residual_stride = size;
  apply_linear(input.from_hidden, buffers.normed, rows, buffers.linear_input, output);
}

void apply_final_norm(const CausalModel& model, float* x, int64_t count) {
  if (model.weights.final_norm.gamma == nullptr) return;
  apply_norm(model.config, model.weights.final_norm, x, x, count);
}

void write_hidden_rows(const CausalForwardParams& params, const CausalWorkspace& w,
                       int64_t num_segments, int64_t rows) {
  const int64_t size = params.model->config.model_size;
  apply_final_norm(*params.model, w.x, rows);
  for (int64_t i = 0; i < num_segments; ++i) {
    const Segment& segment = w.segments[i];
    std::copy_n(w.x + segment.row * size, segment.count * size,
                params.hidden_out + segment.first_token * size);
  }
}

// Angles in float32, as transformers has them; their sines and cosines rounded once. positions
// [rows]; cosines and sines [num_rotary, max_rows, most_turned() / 2].
void rotary_angles(const CausalModel& model, const int64_t* positions, int64_t rows,
                   int64_t max_rows, float* cosines, float* sines) {
  const int64_t half = model.most_turned() / 2;
  for (int64_t rotary = 0; rotary < model.num_rotary; ++rotary) {
    const float* const frequencies = model.frequencies + rotary * half;
    const float scale = model.rotary_scales[rotary];
    // half may be 0
    const double row_nanoseconds = 1.0 + tuning::kNanosecondsPerAngle * static_cast<double>(half);
    parallel_rows(rows, row_nanoseconds, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t at = (rotary * max_rows + row) * half;
        const float position = static_cast<float>(positions[row]);
        for (int64_t i = 0; i < half; ++i) {
          const double angle = static_cast<double>(frequencies[i] * position);
          cosines[at + i] = static_cast<float>(std::cos(angle)) * scale;
          sines[at + i] = static_cast<float>(std::sin(angle)) * scale;
        }
      }
    });
  }
}

// Norms heads of `size` features in rows of `stride`. gamma [size], or null: 1. first: the first
// row's first head.
void norm_heads(const DecoderConfig& config, const float* gamma, float* first, int64_t stride,
                int64_t rows, int64_t all, int64_t size) {
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

// Norms the heads in qkv [rows, layer.weights.qkv_stride], and copies keys that are also values.
void prepare_heads(const CausalModel& model, const CausalLayer& layer, int64_t rows, float* qkv) {
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

using attention::SlidingWindowAttentionParams;

class CausalForward {
 public:
  explicit CausalForward(const CausalForwardParams& p) : p_(p), m_(*p.model), c_(m_.config) {
    max_blocks_ = p.caches[0].table.max_blocks;
    w_.split(m_, p.max_rows, p.sequences(), max_blocks_, p.workspace, &buffers_);
  }

  void run() {
    while (collect() > 0) {
      append_blocks();
      list_sequences();
      take_states();
      place_rows();
      embed();
      compute_angles();
      for (int64_t layer = 0; layer < c_.layers && rows_ > 0; ++layer) run_layer(m_.layers[layer]);
      drop_blocks();
      write_logits();
    }
  }

  // LayerAttention::self() of a layer.
  int64_t attend(const CausalLayer& layer, float* qkv, float* out, float* x);
  int64_t mix(const CausalLayer& layer, float* projected, float* out, float* x);
  void run_mixer(const CausalLayer& layer, float* rows, float* out, int64_t out_stride) const;

 private:
  const CausalEntry& entry_of(const Segment& segment) const { return p_.entries[segment.entry]; }

  // Whether no later layer has keys or a state of its own.
  bool is_last(const CausalLayer& layer) const { return &layer == m_.layers + m_.last_with_keys; }

  bool is_prompt(const Segment& segment) const { return entry_of(segment).is_prompt != 0; }

  // The next tokens of entries, max_rows at most: their segments, in the order of entries. Returns
  // how many tokens.
  int64_t collect() {
    num_segments_ = num_logits_ = 0;
    int64_t tokens = 0;
    while (entry_ < p_.num_entries && tokens < p_.max_rows) {
      const CausalEntry& entry = p_.entries[entry_];
      const int64_t count = std::min(entry.count - taken_, p_.max_rows - tokens);
      const int64_t position = p_.caches[0].table.lengths[entry.sequence];
      taken_ += count;
      const int64_t without_logits = entry.count - entry.num_logits;
      const int64_t logits = std::clamp<int64_t>(taken_ - without_logits, 0, count);
      w_.segments[num_segments_++] = {entry_, token_, position, count, logits, 0};
      num_logits_ += logits;
      tokens += count;
      token_ += count;
      if (taken_ == entry.count) {
        ++entry_;
        taken_ = 0;
      }
    }
    return tokens;
  }

  // Room for the rows in every cache, and the copies of blocks that this takes.
  void append_blocks() {
    std::fill_n(w_.num_tokens, p_.sequences(), int64_t{0});
    for (int64_t i = 0; i < num_segments_; ++i) {
      w_.num_tokens[entry_of(w_.segments[i]).sequence] = w_.segments[i].count;
    }
    kv_cache::IntegerRows num_tokens;
    num_tokens.data = w_.num_tokens;
    for (int64_t cache = 0; cache < p_.num_caches; ++cache) {
      const kv_cache::BlockTable& table = p_.caches[cache].table;
      const int64_t missing = missing_blocks(table, num_tokens);
      if (missing == 0) continue;
      throw std::runtime_error("causal_forward_: caches.pool of cache " + std::to_string(cache) +
                               ", with a window, has " + std::to_string(table.num_blocks) +
                               " blocks; expected " + std::to_string(missing) + " more for " +
                               std::to_string(rows_) + " tokens");
    }
    check_states();
    for (int64_t cache = 0; cache < p_.num_caches; ++cache) {
      const PagedCache& paged = p_.caches[cache];
      append_to_block_table(paged.table, num_tokens, w_.copies);
      const kv_cache::BlockPool pool = paged.block_pool();
      kv_cache::copy_blocks_cpu(
          {&pool, 1, w_.copies, paged.table.counters[kv_cache::kBlockCopies]});
    }
  }

  // Room for the states that are to be kept, before anything is changed.
  void check_states() {
    if (m_.mixer.kind == MixerKind::kNone) return;
    const kv_cache::StateSlots& slots = p_.states.slots;
    int64_t all = 0;
    for (int64_t i = 0; i < num_segments_; ++i) {
      const Segment& segment = w_.segments[i];
      const int64_t sequence = entry_of(segment).sequence;
      if (is_prompt(segment)) {
        slots.prompt_ends[sequence] = static_cast<int32_t>(segment.position + segment.count);
      }
      const int64_t more = states_to_keep(slots, sequence, segment.position, segment.count);
      all += more;
      const int64_t kept = slots.kept(sequence) + more;
      if (kept <= slots.max_kept) continue;
      throw std::runtime_error("causal_forward_: caches.slots has room for " +
                               std::to_string(slots.max_kept) + " states of a sequence; expected " +
                               std::to_string(kept));
    }
    const int64_t free = slots.counters[kv_cache::kFreeSlots];
    if (all <= free) return;
    throw std::runtime_error("causal_forward_: caches.states has " + std::to_string(free) +
                             " free slots; expected " + std::to_string(all));
  }

  // Which states the segments begin with, and which ones are to be kept.
  void take_states() {
    if (m_.mixer.kind == MixerKind::kNone) return;
    const kv_cache::StateSlots& slots = p_.states.slots;
    StateTarget* target = w_.state_targets;
    for (int64_t i = 0; i < num_segments_; ++i) {
      const Segment& segment = w_.segments[i];
      const int64_t sequence = entry_of(segment).sequence, end = segment.position + segment.count;
      StateSegment& of = w_.state_segments[i];
      of = {segment.row, segment.count, slots.find(sequence, segment.position), target, 0};
      for (int64_t t = 0; t < segment.count; ++t) {
        const int64_t position = segment.position + t + 1;
        if (!slots.keeps(sequence, position, end)) continue;
        *target++ = {t, take_state_slot(slots, sequence, position)};
        ++of.num_targets;
      }
    }
  }

  // Token, position and place in the caches of each row.
  void place_rows() {
    for (int64_t i = 0; i < num_segments_; ++i) {
      const Segment& segment = w_.segments[i];
      for (int64_t t = 0; t < segment.count; ++t) {
        const int64_t row = segment.row + t, position = segment.position + t;
        w_.tokens[row] = p_.tokens[segment.first_token + t];
        w_.positions[row] = position;
        for (int64_t cache = 0; cache < p_.num_caches; ++cache) {
          const PagedCache& paged = p_.caches[cache];
          const int64_t size = paged.table.block_size;
          const int32_t* const blocks = paged.table.row(entry_of(segment).sequence);
          w_.places[cache][row] =
              blocks[position / size] * paged.block_stride() + position % size * paged.row_size();
        }
      }
    }
  }

  // Rows of the segments, prompts first, and their groups for attention.
  void list_sequences() {
    rows_ = 0;
    list_sequences(&w_.prompts, /*of_prompts=*/true);
    list_sequences(&w_.generated, /*of_prompts=*/false);
  }

  void list_sequences(AttentionGroup* group, bool of_prompts) {
    group->first_row = rows_;
    group->sequences = 0;
    if (of_prompts) group->query_ends[0] = 0;
    for (int64_t i = 0; i < num_segments_; ++i) {
      Segment& segment = w_.segments[i];
      if (is_prompt(segment) != of_prompts || segment.count == 0) continue;
      segment.row = rows_;
      rows_ += segment.count;
      for (int64_t t = of_prompts ? segment.count : 1; t <= segment.count; ++t) {
        const int64_t at = group->sequences++;
        group->lengths[at] = segment.position + t;
        for (int64_t cache = 0; cache < p_.num_caches; ++cache) {
          const kv_cache::BlockTable& table = p_.caches[cache].table;
          std::copy_n(table.row(entry_of(segment).sequence), table.blocks_for(group->lengths[at]),
                      group->tables[cache] + at * max_blocks_);
        }
        if (of_prompts) group->query_ends[at + 1] = group->query_ends[at] + segment.count;
      }
    }
    group->rows = rows_ - group->first_row;
  }

  // In the last layer with keys of its own these are all that is wanted of rows without logits. Of
  // the others x, queries [rows, query_bytes] and, where they are given, projected [rows, size]
  // move up, and the later layers read them.
  void keep_rows_with_logits(float* x, void* queries, int64_t query_bytes,
                             float* projected = nullptr, int64_t size = 0) {
    if (num_logits_ == rows_ || p_.hidden_out != nullptr) return;
    char* const bytes = static_cast<char*>(queries);
    const int64_t inputs = c_.layers * m_.per_layer.size;
    int64_t to = 0;
    for (const bool of_prompts : {true, false}) {  // in the order of rows
      for (int64_t i = 0; i < num_segments_; ++i) {
        Segment& segment = w_.segments[i];
        if (is_prompt(segment) != of_prompts) continue;
        const int64_t end = segment.end();
        for (int64_t from = end - segment.logits; from < end; ++from, ++to) {
          if (from == to) continue;
          std::copy_n(bytes + from * query_bytes, query_bytes, bytes + to * query_bytes);
          std::copy_n(x + from * c_.model_size, c_.model_size, x + to * c_.model_size);
          if (projected != nullptr)
            std::copy_n(projected + from * size, size, projected + to * size);
          std::copy_n(w_.per_layer + from * inputs, inputs, w_.per_layer + to * inputs);
          w_.positions[to] = w_.positions[from];
        }
        segment.position += segment.count - segment.logits;
        segment.count = segment.logits;
      }
    }
    list_sequences();
    if (m_.last_with_keys < c_.layers - 1) compute_angles();
  }

  void embed() const {
    const int64_t size = c_.model_size;
    parallel_rows(rows_, tuning::kNanosecondsPerCopy * static_cast<double>(size),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t row = begin; row < end; ++row) embed_row(row, w_.x + row * size);
                  });
    if (m_.hidden_input.is_there()) project_hidden_rows(p_, w_, buffers_, num_segments_, rows_);
    if (m_.per_layer.size == 0) return;
    per_layer_inputs_cpu(c_, m_.per_layer, w_.tokens, w_.x, rows_, buffers_.linear_input,
                         w_.table_rows, w_.per_layer);
  }

  void embed_row(int64_t row, float* x) const {
    const int64_t size = c_.model_size;
    m_.embedding.read(w_.tokens[row], size, x);
    for (int64_t i = 0; i < size; ++i) x[i] *= c_.embedding_scale;
    if (m_.weights.positions == nullptr) return;
    const float* const position = m_.weights.positions + w_.positions[row] * size;
    for (int64_t i = 0; i < size; ++i) x[i] += position[i];
  }

  void compute_angles() const {
    rotary_angles(m_, w_.positions, rows_, p_.max_rows, w_.cosines, w_.sines);
  }

  void run_layer(const CausalLayer& layer);

  SlidingWindowAttentionParams attention_params(const CausalLayer& layer,
                                                const AttentionGroup& group, const float* qkv,
                                                float* out) const {
    const PagedCache& cache = p_.caches[layer.cache];
    SlidingWindowAttentionParams a;
    a.dtype = cache.dtype;
    a.sequences = group.sequences;
    a.q_heads = c_.heads;
    a.kv_heads = layer.heads.kv_heads;
    const int64_t head_size = layer.heads.size, query_size = c_.heads * head_size;
    a.head_size = a.value_size = head_size;
    a.kv_len = max_blocks_ * cache.table.block_size;
    const bool is_float = cache.dtype == DType::kFloat32;
    const int64_t q_stride = is_float ? layer.weights.qkv_stride : query_size;
    const int64_t out_stride = is_float ? attended_stride(layer) : query_size;
    a.q_strides = {q_stride, head_size, q_stride, 1};
    a.out_strides = {out_stride, head_size, out_stride, 1};
    if (is_float) {
      a.q = qkv + group.first_row * q_stride;
      a.out = out + group.first_row * out_stride;
    } else {
      a.q = w_.queries + group.first_row * q_stride;
      a.out = w_.context + group.first_row * out_stride;
    }
    a.k = cache.keys(layer.cache_layer);
    a.v = cache.values(layer.cache_layer);
    a.k_strides = a.v_strides = cache.strides();
    a.has_int8_keys = cache.is_int8;
    a.places.block_table = group.tables[layer.cache];
    a.places.sequence_stride = max_blocks_;
    a.places.block_size = cache.table.block_size;
    a.places.rows = cache.table.num_blocks;
    a.kv_lengths = group.lengths;
    a.window = layer.window;
    a.sinks = layer.sinks;
    a.scale = c_.attention_scale;
    a.softcap = m_.attention_softcap;
    return a;
  }

  // Features of attention's output, with the mixer's beside it.
  int64_t attended_stride(const CausalLayer& layer) const {
    return c_.heads * layer.heads.size + (layer.has_state() ? m_.mixer.mixed() : 0);
  }

  void drop_blocks() const {
    for (int64_t cache = 0; cache < p_.num_caches; ++cache) {
      const PagedCache& paged = p_.caches[cache];
      for (int64_t i = 0; i < num_segments_; ++i) {
        const int64_t sequence = entry_of(w_.segments[i]).sequence;
        drop_leading_blocks(paged.table, sequence,
                            paged.first_kept_block(paged.table.lengths[sequence]));
      }
    }
    if (m_.mixer.kind == MixerKind::kNone) return;
    for (int64_t i = 0; i < num_segments_; ++i) {
      const int64_t sequence = entry_of(w_.segments[i]).sequence;
      drop_states(p_.states.slots, sequence, p_.caches[0].table.lengths[sequence]);
    }
  }

  void write_logits() {
    if (p_.hidden_out != nullptr) write_hidden_rows(p_, w_, num_segments_, rows_);
    if (num_logits_ == 0) return;
    const int64_t size = c_.model_size, vocab = c_.vocab;
    float* to = buffers_.normed;
    for (int64_t i = 0; i < num_segments_; ++i) {
      const Segment& segment = w_.segments[i];
      to = std::copy_n(w_.x + (segment.end() - segment.logits) * size, segment.logits * size, to);
    }
    if (p_.hidden_out == nullptr) apply_final_norm(m_, buffers_.normed, num_logits_);
    linear::LinearOutput output;
    output.y = p_.logits + logits_written_ * vocab;
    apply_linear(m_.weights.logits, buffers_.normed, num_logits_, buffers_.linear_input, output);
    if (m_.logits_scale != 1.0f || m_.logits_softcap != 0.0f) {
      const auto cap = LMD_SELECT_KERNEL(decoder, soft_cap);
      parallel_rows(num_logits_, tuning::kNanosecondsPerLogit * static_cast<double>(vocab),
                    [&](int64_t begin, int64_t end) {
                      cap(output.y + begin * vocab, (end - begin) * vocab, m_.logits_scale,
                          m_.logits_softcap);
                    });
    }
    logits_written_ += num_logits_;
  }

  const CausalForwardParams& p_;
  const CausalModel& m_;
  const DecoderConfig& c_;
  CausalWorkspace w_;
  LayerBuffers buffers_;
  int64_t max_blocks_ = 0;
  int64_t entry_ = 0, taken_ = 0,
          token_ = 0;  // the next to collect: entry, token in it, token of the call
  int64_t rows_ = 0, num_segments_ = 0, num_logits_ = 0, logits_written_ = 0;
};

int64_t CausalForward::attend(const CausalLayer& layer, float* qkv, float* out, float* x) {
  if (layer.has_state()) {
    const int64_t query_size = c_.heads * layer.heads.size;
    run_mixer(layer, qkv + query_size + 2 * layer.heads.key_size(), out + query_size,
              attended_stride(layer));
  }
  prepare_heads(m_, layer, rows_, qkv);
  const int64_t stride = layer.weights.qkv_stride, query_size = c_.heads * layer.heads.size;
  const PagedCache& cache = p_.caches[layer.cache];
  const bool is_float = cache.dtype == DType::kFloat32;
  CausalRowsParams rows;
  rows.heads = c_.heads;
  rows.kv_heads = layer.keys == KeySource::kShared ? 0 : layer.heads.kv_heads;
  rows.head_size = layer.heads.size;
  rows.qkv = qkv;
  rows.row_stride = stride;
  if (layer.rotary >= 0) {
    rows.half = layer.heads.turned / 2;
    rows.angle_stride = m_.most_turned() / 2;
    rows.cosines = w_.cosines + layer.rotary * p_.max_rows * rows.angle_stride;
    rows.sines = w_.sines + layer.rotary * p_.max_rows * rows.angle_stride;
  }
  rows.dtype = cache.dtype;
  rows.queries = is_float ? nullptr : w_.queries;
  rows.keys = cache.keys(layer.cache_layer);
  rows.values = cache.values(layer.cache_layer);
  rows.places = w_.places[layer.cache];
  rows.is_int8 = cache.is_int8;
  rows.head_stride = cache.head_stride();
  const double row_nanoseconds = tuning::kNanosecondsPerCopy * static_cast<double>(stride);
  const auto to_cache = LMD_SELECT_KERNEL(decoder, causal_rows);
  parallel_rows(rows_, row_nanoseconds,
                [&](int64_t begin, int64_t end) { to_cache(rows, begin, end); });
  if (is_last(layer)) {
    float* also = layer.has_state() ? out : nullptr;  // the mixer's output
    int64_t also_stride = attended_stride(layer);
    if (c_.attention_gate && !is_float) {
      also = qkv;
      also_stride = stride;
    }
    is_float ? keep_rows_with_logits(x, qkv, stride * 4, also, also_stride)
             : keep_rows_with_logits(x, w_.queries, query_size * 2, also, also_stride);
  }

  if (w_.prompts.rows > 0) {
    SlidingWindowAttentionParams a = attention_params(layer, w_.prompts, qkv, out);
    a.cu_seqlens_q = w_.prompts.query_ends;
    a.ragged_queries = w_.prompts.rows;
    a.q_strides.sequence = a.out_strides.sequence = 0;
    sliding_window_attention_cpu(a);
  }
  if (w_.generated.rows > 0) {
    SlidingWindowAttentionParams a = attention_params(layer, w_.generated, qkv, out);
    a.q_len = 1;
    sliding_window_decode_cpu(a);
  }
  if (!is_float) {
    const ConvertRowsParams converted{w_.context, out, query_size, attended_stride(layer)};
    const auto convert = LMD_SELECT_KERNEL(decoder, convert_rows);
    parallel_rows(rows_, row_nanoseconds,
                  [&](int64_t begin, int64_t end) { convert(converted, begin, end); });
  }
  if (c_.attention_gate) {
    const GateRowsParams gated{qkv + stride - query_size, stride, out, query_size};
    const auto gate = LMD_SELECT_KERNEL(decoder, gate_rows);
    parallel_rows(rows_, 2 * row_nanoseconds,
                  [&](int64_t begin, int64_t end) { gate(gated, begin, end); });
  }
  return rows_;
}

void CausalForward::run_mixer(const CausalLayer& layer, float* rows, float* out,
                              int64_t out_stride) const {
  StateLayerParams s;
  s.config = m_.mixer;
  s.weights = layer.mixer;
  s.state = {w_.state_segments, num_segments_, p_.states.pool + layer.state, p_.states.state_size};
  s.norm_epsilon = c_.norm_epsilon;
  s.rows = rows;
  s.row_stride = layer.weights.qkv_stride;
  s.num_rows = rows_;
  s.gates = w_.gates;
  s.out = out;
  s.out_stride = out_stride;
  state_layer_cpu(s);
}

int64_t CausalForward::mix(const CausalLayer& layer, float* projected, float* out, float* x) {
  run_mixer(layer, projected, out, m_.mixer.mixed());
  if (is_last(layer)) keep_rows_with_logits(x, out, m_.mixer.mixed() * 4);
  return rows_;
}

class CausalLayerAttention final : public LayerAttention {
 public:
  CausalLayerAttention(CausalForward& forward, const CausalLayer& layer)
      : forward_(forward), layer_(layer) {}
  int64_t self(float* qkv, float* out, float* x) const override {
    return layer_.has_attention() ? forward_.attend(layer_, qkv, out, x)
                                  : forward_.mix(layer_, qkv, out, x);
  }
  void cross(const float*, float*) const override {}  // config.memory_size is 0: never called

 private:
  CausalForward& forward_;
  const CausalLayer& layer_;
};

void CausalForward::run_layer(const CausalLayer& layer) {
  decoder_layer_cpu(c_, layer.weights, CausalLayerAttention(*this, layer), buffers_, rows_, w_.x);
  if (rows_ == 0) return;
  const int64_t size = m_.per_layer.size, number = &layer - m_.layers;
  add_per_layer_input_cpu(c_, layer.per_layer, buffers_,
                          size == 0 ? nullptr : w_.per_layer + number * size, c_.layers * size,
                          rows_, w_.x);
}

}  // namespace

size_t causal_workspace_bytes(const CausalModel& model, int64_t max_rows, int64_t sequences,
                              int64_t max_blocks) {
  LayerBuffers buffers;
  return CausalWorkspace{}.split(model, max_rows, sequences, max_blocks, nullptr, &buffers);
}

void causal_forward_cpu(const CausalForwardParams& params) {
  const ScopedIeeeMode ieee;
  CausalForward(params).run();
}

}  // namespace lmdecode::decoder
