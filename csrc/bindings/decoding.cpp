// decoding_steps_, decoding_read_memory_, decoder_layer and gather_tree on CPU tensors.
#include <algorithm>
#include <cmath>
#include <utility>

#include "bindings/decoder.h"
#include "decoder/decoder_layer.h"
#include "decoder/faster_transformer_search.h"
#include "decoder/gather_tree.h"

namespace lmdecode::decoder {
namespace {

constexpr const char* kStepsOp = "decoding_steps_";
constexpr const char* kReadOp = "decoding_read_memory_";
constexpr const char* kLayerOp = "decoder_layer";
constexpr const char* kWorkspaceOp = "decoding_workspace_bytes";
constexpr const char* kFasterTransformerOp = "faster_transformer_decoding_";
constexpr const char* kGatherTreeOp = "gather_tree";

void check_number(const char* op, const char* name, int64_t entry, int64_t value, int64_t low,
                  int64_t high) {
  if (value >= low && value <= high) return;
  fail(op, name, "[", entry, "] is ", value, "; expected ", low, " to ", high);
}

TokenRules token_rules(const char* op, const Tensors& tensors, int64_t slots, int64_t vocab) {
  TensorList list(op, "token_rules", tensors, 6);
  TokenRules rules;
  rules.repetition_penalty =
      list.next<const float>("repetition_penalty", ScalarType::Float, {slots});
  rules.no_repeat_ngram_size =
      list.next<const int64_t>("no_repeat_ngram_size", ScalarType::Long, {slots});
  rules.diversity_penalty = list.next<const float>("diversity_penalty", ScalarType::Float, {slots});
  check_rank(op, "token_rules.bans", tensors[3], 3, "[slots, bans, 4]");
  rules.num_bans = tensors[3].size(1);
  rules.bans = list.next<const int64_t>("bans", ScalarType::Long, {slots, rules.num_bans, 4});
  check_rank(op, "token_rules.forced", tensors[4], 3, "[slots, forced tokens, 2]");
  rules.num_forced = tensors[4].size(1);
  rules.forced = list.next<const int64_t>("forced", ScalarType::Long, {slots, rules.num_forced, 2});
  rules.bias = list.next_or_null<const float>("bias", ScalarType::Float, {vocab});
  for (int64_t slot = 0; slot < slots; ++slot) {
    if (!(rules.repetition_penalty[slot] > 0.0f)) {
      fail(op, "token_rules.repetition_penalty[", slot, "] is ", rules.repetition_penalty[slot],
           "; expected a number above 0");
    }
  }
  return rules;
}

// Of a search that goes on, before anything is written.
void check_search(const DecodingParams& p, int64_t slot) {
  const beam::BeamSearchState& state = p.state;
  const int64_t request = slot / p.num_groups;
  check_number(kStepsOp, "parameters.num_beams", slot, p.parameters.num_beams[slot], 1,
               state.beams);
  check_number(kStepsOp, "parameters.num_hypotheses", slot, p.parameters.num_hypotheses[slot], 1,
               state.hypotheses);
  check_number(kStepsOp, "parameters.early_stopping", slot, p.parameters.early_stopping[slot], 0,
               2);
  check_number(kStepsOp, "parameters.max_lengths", slot, p.parameters.max_lengths[slot], 0,
               state.capacity);
  const int64_t length = state.lengths[slot];
  check_number(kStepsOp, "state.lengths", slot, length, 1, state.capacity);
  check_number(kStepsOp, "parameters.prompt_lengths", slot, p.parameters.prompt_lengths[slot], 0,
               length);
  check_number(kStepsOp, "caches.cached_lengths", request, p.cached_lengths[request], 0, length);
  check_number(kStepsOp, "caches.memory_lengths", request, p.caches.memory_lengths[request], 0,
               p.caches.source);
  // Where too few candidates go on, the beams that are left go on with it.
  if (p.rules != beam::BeamRules::kScorer && !p.greedy) {
    check_number(kStepsOp, "parameters.pad_tokens", slot, p.parameters.pad_tokens[slot], 0,
                 p.config.vocab - 1);
  }
  // What is not cached is read as the prompt of the request, for all of its groups at once.
  const int64_t first_slot = request * p.num_groups;
  if (p.cached_lengths[request] < length - 1 &&
      (!p.is_running(first_slot) || state.lengths[first_slot] != length)) {
    fail(kStepsOp, "caches.cached_lengths[", request, "] is ", p.cached_lengths[request],
         "; expected ", length - 1, ", since slot ", slot, " goes on alone");
  }
  const int64_t rows = slot * state.beams;
  for (int64_t beam = 0; beam < p.parameters.num_beams[slot]; ++beam) {
    const int64_t* const tokens = state.sequences + (rows + beam) * state.capacity;
    const int64_t begin = beam == 0 ? p.cached_lengths[request] : length - 1;
    for (int64_t i = begin < length ? begin : length - 1; i < length; ++i) {
      if (tokens[i] >= 0 && tokens[i] < p.config.vocab) continue;
      fail(kStepsOp, "state.sequences[", slot, ", ", beam, ", ", i, "] is ", tokens[i],
           "; expected a token, 0 to ", p.config.vocab - 1);
    }
    const int32_t* const table = p.caches.table + (rows + beam) * state.capacity;
    for (int64_t i = 0; i < p.cached_lengths[request] && i < length - 1; ++i) {
      if (table[i] >= 0 && table[i] < p.cache_rows()) continue;
      fail(kStepsOp, "caches.table[", rows + beam, ", ", i, "] is ", table[i],
           "; expected a row of the cache, 0 to ", p.cache_rows() - 1);
    }
  }
  const int64_t most =
      p.parameters.max_lengths[slot] > 0 ? p.parameters.max_lengths[slot] : state.capacity;
  if (p.weights.positions != nullptr && most - 1 > p.weights.num_positions) {
    fail(kStepsOp, "parameters.max_lengths[", slot, "] is ", most, "; expected at most ",
         p.weights.num_positions + 1, ": the model has ", p.weights.num_positions, " positions");
  }
}

void check_logits(const Tensor& logits, int64_t rows, int64_t vocab) {
  check_dtype(kStepsOp, "logits", logits, ScalarType::Float);
  if (logits.dim() != 2 || logits.size(0) != rows || logits.size(1) != vocab) {
    fail(kStepsOp, "logits has shape ", shape_text(logits), "; expected ",
         beam::sizes_text({rows, vocab}));
  }
  if (!logits.is_cpu()) fail(kStepsOp, "logits is on ", device_name(logits), "; expected cpu");
  if (!logits.is_contiguous()) {
    fail(kStepsOp, "logits has strides; expected a contiguous tensor");
  }
}

// Steps write to logits between reading these, which are contiguous, and have been checked.
void check_apart(const Tensor& logits, const char* name, const Tensors& tensors) {
  const auto begin = [](const Tensor& t) { return static_cast<const char*>(t.const_data_ptr()); };
  const auto end = [&](const Tensor& t) {
    return begin(t) + t.numel() * static_cast<int64_t>(t.element_size());
  };
  for (const Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    if (begin(logits) < end(tensor) && begin(tensor) < end(logits)) {
      fail(kStepsOp, "logits shares memory with ", name, "; expected a tensor of its own");
    }
  }
}

Tensor decoding_steps(const Tensors& weights, const Integers& config, const Numbers& numbers,
                      const Tensors& state, const Tensors& parameters, const Tensors& rules,
                      const Tensors& caches, const Tensor& workspace, const Integers& options,
                      const std::optional<Tensor>& logits) {
  const char* const op = kStepsOp;
  const DecoderModel model(op, weights, config, numbers);
  const CacheTensors cache(op, caches, model.config);
  DecodingParams p;
  p.config = model.config;
  p.weights = model.weights;
  const Tensor& first = beam::state_sequences(op, state);
  const beam::LikeTensor like(first);
  p.state = beam::beam_search_state(op, state, like);
  p.parameters = beam::beam_search_parameters(op, parameters, p.state.slots, like);
  IntegerList list(op, "options", options, 7);
  p.rules = static_cast<beam::BeamRules>(list.next("rules", 0, 2));
  p.greedy = list.next_flag("greedy");
  p.num_groups = list.next("num_groups", 1);
  p.num_candidates = list.next("num_candidates", 1, (int64_t{1} << 24));
  p.max_steps = list.next("max_steps", 0, INT64_MAX);
  p.stop_when_done = list.next_flag("stop_when_done");
  p.chooses = list.next_flag("chooses");
  p.token_rules = token_rules(op, rules, p.state.slots, model.config.vocab);
  p.caches = cache.caches;
  p.cached_lengths = cache.cached_lengths;
  if (cache.caches.requests * p.num_groups != p.state.slots) {
    fail(op, "state.sequences has ", p.state.slots, " slots; expected num_groups, ", p.num_groups,
         ", for each of the ", cache.caches.requests, " requests of caches");
  }
  if (cache.caches.rows != p.cache_rows() || cache.caches.capacity != p.state.capacity) {
    fail(op, "caches.self_keys has ", cache.caches.rows, " rows of ", cache.caches.capacity,
         " positions; expected ", p.cache_rows(), " of ", p.state.capacity, ", those of the state");
  }
  if (p.greedy && p.state.beams != 1) {
    fail(op, "state.sequences has ", p.state.beams, " beams; expected 1 where it is greedy");
  }
  if (p.cache_rows() * p.num_candidates >= kMaxDecoderSize) {
    fail(op, "options.num_candidates is ", p.num_candidates, " for ", p.cache_rows(),
         " rows; expected fewer than 2^31 in all");
  }
  if (p.weights.relative_bias != nullptr && p.weights.num_distances + 1 < p.state.capacity) {
    fail(op, "weights.relative_bias has ", p.weights.num_distances,
         " distances; expected at least ", p.state.capacity - 1,
         ", one less than the capacity of the state");
  }
  for (int64_t slot = 0; slot < p.state.slots; ++slot) {
    if (p.is_running(slot)) check_search(p, slot);
  }
  check_dtype(op, "workspace", workspace, ScalarType::Byte);
  const int64_t bytes = static_cast<int64_t>(decoding_workspace_bytes(p));
  p.workspace = workspace.mutable_data_ptr();
  if (!workspace.is_cpu() || !workspace.is_contiguous() || workspace.numel() < bytes ||
      reinterpret_cast<uintptr_t>(p.workspace) % 64 != 0) {
    fail(op, "workspace has ", workspace.numel(), " bytes on ", device_name(workspace),
         "; expected at least ", bytes, " on cpu, aligned to 64");
  }
  if (logits) {
    check_logits(*logits, p.cache_rows(), p.config.vocab);
    check_apart(*logits, "weights", weights);
    check_apart(*logits, "state", state);
    check_apart(*logits, "parameters", parameters);
    check_apart(*logits, "token_rules", rules);
    check_apart(*logits, "caches", caches);
    check_apart(*logits, "workspace", {workspace});
    p.logits = static_cast<float*>(logits->mutable_data_ptr());
  }
  Tensor steps = new_tensor(first, {}, ScalarType::Long);
  *static_cast<int64_t*>(steps.mutable_data_ptr()) = decoding_steps_cpu(p);
  return steps;
}

// sizes: slots, beams, capacity, num_groups, num_candidates, num_bans
int64_t decoding_workspace(const Integers& config, const Numbers& numbers, const Integers& sizes) {
  IntegerList list(kWorkspaceOp, "sizes", sizes, 6);
  DecodingParams p;
  p.config = decoder_config(kWorkspaceOp, config, numbers);
  p.state.slots = list.next("slots", 0);
  p.state.beams = list.next("beams", 1);
  p.state.capacity = list.next("capacity", 0);
  p.num_groups = list.next("num_groups", 1);
  p.num_candidates = list.next("num_candidates", 1);
  p.token_rules.num_bans = list.next("num_bans", 0);
  return static_cast<int64_t>(decoding_workspace_bytes(p));
}

// Keys and values of the memories [n, S, memory_size] to the cross caches of their requests.
void read_memory(const Tensors& weights, const Integers& config, const Numbers& numbers,
                 const Tensors& caches, const Tensor& memory, const Tensor& lengths,
                 const Tensor& requests) {
  const char* const op = kReadOp;
  const DecoderConfig c = decoder_config(op, config, numbers);
  TensorList list(op, "weights", weights, kLayerTensors * static_cast<size_t>(c.layers));
  std::vector<LayerWeights> layers;
  for (int64_t layer = 0; layer < c.layers; ++layer) layers.push_back(layer_weights(op, list, c));
  const CacheTensors cache(op, caches, c);
  check_rank(op, "memory", memory, 3, "[requests, source, memory_size]");
  check_dtype(op, "memory", memory, ScalarType::Float);
  const int64_t count = memory.size(0), source = memory.size(1);
  if (memory.size(2) != c.memory_size || source > cache.caches.source || !memory.is_contiguous()) {
    fail(op, "memory has shape ", shape_text(memory), "; expected [requests, at most ",
         cache.caches.source, ", ", c.memory_size, "], contiguous");
  }
  check_dtype(op, "lengths", lengths, ScalarType::Long);
  check_shape(op, "lengths", lengths, count);
  check_dtype(op, "requests", requests, ScalarType::Long);
  check_shape(op, "requests", requests, count);
  const int64_t* const length = static_cast<const int64_t*>(lengths.const_data_ptr());
  const int64_t* const request = static_cast<const int64_t*>(requests.const_data_ptr());
  for (int64_t i = 0; i < count; ++i) {
    check_number(op, "lengths", i, length[i * lengths.stride(0)], 0, source);
    check_number(op, "requests", i, request[i * requests.stride(0)], 0, cache.caches.requests - 1);
  }
  const AttentionShape shape{c.heads, c.head_size, 1.0f, 0.0f};
  // So many rows at a time that what they give stays in the cache of the processor.
  constexpr int64_t kRows = 256;
  const int64_t together = source > 0 && source < kRows ? kRows / source : 1;
  const int64_t rows = together * source;
  Tensor key_value = new_tensor(memory, {rows, 2 * shape.size()}, ScalarType::Float);
  const size_t scratch_bytes = linear_input_bytes(c.format, c.memory_size, rows);
  Tensor scratch = new_tensor(memory, {static_cast<int64_t>(scratch_bytes)}, ScalarType::Byte);
  float* const to = static_cast<float*>(key_value.mutable_data_ptr());
  const float* const from = static_cast<const float*>(memory.const_data_ptr());
  const int64_t area = shape.heads * shape.padded_head() * cache.caches.source;
  for (int64_t begin = 0; begin < count; begin += together) {
    const int64_t end = std::min(begin + together, count);
    for (int64_t layer = 0; layer < c.layers; ++layer) {
      if (source > 0) {
        linear::LinearOutput output;
        output.y = to;
        apply_linear(layers[static_cast<size_t>(layer)].cross_key_value,
                     from + begin * source * c.memory_size, (end - begin) * source,
                     scratch.mutable_data_ptr(), output);
      }
      for (int64_t i = begin; i < end; ++i) {
        const int64_t at = layer * cache.caches.requests + request[i * requests.stride(0)];
        write_cross_cache_cpu({shape, cache.caches.source, length[i * lengths.stride(0)],
                               to + (i - begin) * source * 2 * shape.size(),
                               cache.cross_keys + at * area, cache.cross_values + at * area});
      }
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    cache.memory_lengths[request[i * requests.stride(0)]] = length[i * lengths.stride(0)];
    cache.cached_lengths[request[i * requests.stride(0)]] = 0;
  }
}

// caches: with a request for each memory_rows rows.
std::tuple<Tensor, Tensor, Tensor> faster_transformer_decoding(const Tensors& weights,
                                                               const Integers& config,
                                                               const Numbers& numbers,
                                                               const Tensors& caches,
                                                               const Integers& options) {
  const char* const op = kFasterTransformerOp;
  const DecoderModel model(op, weights, config, numbers);
  const CacheTensors cache(op, caches, model.config);
  FasterTransformerParams p;
  p.config = model.config;
  p.weights = model.weights;
  p.caches = cache.caches;
  IntegerList list(op, "options", options, 4);
  p.beams = list.next("beam_width", 1);
  p.max_steps = list.next("max_seq_len", 0);
  p.start_token = list.next("start_id", 0, p.config.vocab - 1);
  p.end_token = list.next("end_id", 0, p.config.vocab - 1);
  const int64_t rows = cache.caches.rows;
  if (rows % p.beams != 0) {
    fail(op, "options.beam_width is ", p.beams, "; expected a divisor of ", rows,
         ", the rows of caches");
  }
  p.batch = rows / p.beams;
  p.memory_rows = cache.caches.requests == rows ? 1 : p.beams;
  if (p.memory_rows * cache.caches.requests != rows) {
    fail(op, "caches.cross_keys has ", cache.caches.requests, " requests; expected ", p.batch,
         " or ", rows);
  }
  if (cache.caches.capacity < p.max_steps) {
    fail(op, "caches.self_keys has ", cache.caches.capacity, " positions; expected at least ",
         p.max_steps, ", max_seq_len");
  }
  if (p.weights.positions != nullptr && p.weights.num_positions < p.max_steps) {
    fail(op, "weights.positions has ", p.weights.num_positions, " positions; expected at least ",
         p.max_steps, ", max_seq_len");
  }
  if (p.weights.relative_bias != nullptr && p.weights.num_distances < p.max_steps) {
    fail(op, "weights.relative_bias has ", p.weights.num_distances,
         " distances; expected at least ", p.max_steps, ", max_seq_len");
  }
  for (int64_t request = 0; request < cache.caches.requests; ++request) {
    check_number(op, "caches.memory_lengths", request, cache.memory_lengths[request], 0,
                 cache.caches.source);
  }
  const Tensor& like = caches[0];
  const int64_t bytes = static_cast<int64_t>(faster_transformer_workspace_bytes(p));
  Tensor workspace = new_tensor(like, {bytes}, ScalarType::Byte);
  Tensor output_ids = new_tensor(like, {p.max_steps, rows}, ScalarType::Int);
  Tensor parent_ids = new_tensor(like, {p.max_steps, rows}, ScalarType::Int);
  Tensor lengths = new_tensor(like, {rows}, ScalarType::Int);
  p.workspace = workspace.mutable_data_ptr();
  p.output_ids = static_cast<int32_t*>(output_ids.mutable_data_ptr());
  p.parent_ids = static_cast<int32_t*>(parent_ids.mutable_data_ptr());
  p.sequence_lengths = static_cast<int32_t*>(lengths.mutable_data_ptr());
  const uint8_t failed = faster_transformer_search_cpu(p);
  if (failed != 0) {
    fail(op, "a request has ", (failed & 1) != 0 ? "NaN in its logits" : "no logit above -inf",
         "; expected weights and a memory without NaN or inf");
  }
  return {output_ids, parent_ids, lengths};
}

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
Tensor decoder_layer(const Tensor& x, const Tensors& weights, const Integers& config,
                     const Numbers& numbers, const Tensor& relative_bias, const Tensors& caches,
                     const Tensor& cache_rows, const Tensor& positions, const Tensor& requests) {
  const char* const op = kLayerOp;
  DecoderConfig c = decoder_config(op, config, numbers);
  c.layers = 1;
  TensorList list(op, "weights", weights, kLayerTensors);
  const LayerWeights layer = layer_weights(op, list, c);
  const CacheTensors cache(op, caches, c);
  check_rank(op, "x", x, 2, "[rows, model_size]");
  check_dtype(op, "x", x, ScalarType::Float);
  const int64_t rows = x.size(0);
  if (x.size(1) != c.model_size || !x.is_contiguous()) {
    fail(op, "x has shape ", shape_text(x), "; expected [rows, ", c.model_size, "], contiguous");
  }
  const Tensors index_tensors{cache_rows, positions, requests};
  TensorList indices(op, "rows", index_tensors, 3);
  StepRows step;
  step.count = rows;
  step.cache_rows = indices.next<const int32_t>("cache_rows", ScalarType::Int, {rows});
  step.positions = indices.next<const int32_t>("positions", ScalarType::Int, {rows});
  step.requests = indices.next<const int32_t>("requests", ScalarType::Int, {rows});
  const Tensors bias_tensors{relative_bias};
  TensorList bias_list(op, "relative_bias", bias_tensors, 1);
  const float* const bias =
      bias_list.next_or_null<const float>("relative_bias", ScalarType::Float, {c.heads, -1});
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
  if (rows > 0) decoder_layer_cpu(c, layer, step, layer_caches, bias, distances, buffers, to);
  return y;
}

template <class T>
void run_gather_tree(const Tensor& step_ids, const Tensor& parent_ids, const Tensor& lengths,
                     int64_t end_token, const Tensor& sequences) {
  GatherTreeParams<T> p;
  p.steps = step_ids.size(0);
  p.batch = step_ids.size(1);
  p.beams = step_ids.size(2);
  p.step_ids = static_cast<const T*>(step_ids.const_data_ptr());
  p.parent_ids = static_cast<const T*>(parent_ids.const_data_ptr());
  p.lengths = static_cast<const T*>(lengths.const_data_ptr());
  p.end_token = static_cast<T>(end_token);
  p.sequences = static_cast<T*>(sequences.mutable_data_ptr());
  const GatherTreeFault fault = gather_tree_cpu(p);
  if (fault.is_found) {
    fail(kGatherTreeOp, "parent_ids of step ", fault.step, ", batch ", fault.batch, " is ",
         fault.parent, "; expected a beam of the same request, 0 to ", p.beams - 1);
  }
}

Tensor gather_tree(const Tensor& step_ids, const Tensor& parent_ids, const Tensor& lengths,
                   int64_t end_token) {
  const char* const op = kGatherTreeOp;
  check_rank(op, "step_ids", step_ids, 3, "[steps, batch, beams]");
  const ScalarType type = step_ids.scalar_type();
  if (type != ScalarType::Int && type != ScalarType::Long) {
    fail(op, "step_ids has dtype ", dtype_name(type), "; expected int32 or int64");
  }
  if (type == ScalarType::Int && end_token != static_cast<int32_t>(end_token)) {
    fail(op, "end_token is ", end_token, "; expected an int32, as step_ids are");
  }
  const int64_t steps = step_ids.size(0), batch = step_ids.size(1), beams = step_ids.size(2);
  const Tensors tensors{step_ids, parent_ids, lengths};
  TensorList list(op, "arguments", tensors, 3);
  list.next<const void>("step_ids", type, {steps, batch, beams});
  list.next<const void>("parent_ids", type, {steps, batch, beams});
  list.next<const void>("max_sequence_lengths", type, {batch});
  Tensor sequences = new_tensor(step_ids, {steps, batch, beams}, type);
  if (type == ScalarType::Int) {
    run_gather_tree<int32_t>(step_ids, parent_ids, lengths, end_token, sequences);
  } else {
    run_gather_tree<int64_t>(step_ids, parent_ids, lengths, end_token, sequences);
  }
  return sequences;
}

}  // namespace
}  // namespace lmdecode::decoder

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  using namespace lmdecode::decoder;
  m.impl("decoding_steps_", TORCH_BOX(&decoding_steps));
  m.impl("decoding_read_memory_", TORCH_BOX(&read_memory));
  m.impl("faster_transformer_decoding_", TORCH_BOX(&faster_transformer_decoding));
  m.impl("decoder_layer", TORCH_BOX(&decoder_layer));
  m.impl("gather_tree", TORCH_BOX(&gather_tree));
}

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CompositeExplicitAutograd, m) {
  m.impl("decoding_workspace_bytes", TORCH_BOX(&lmdecode::decoder::decoding_workspace));
}
