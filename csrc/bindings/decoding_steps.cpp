// decoding_steps_, decoding_workspace_bytes and decoding_read_memory_, on CPU tensors alone.
#include <algorithm>
#include <cmath>
#include <utility>

#include "bindings/decoder_checks.h"
#include "bindings/token_rule_checks.h"
#include "decoder/decoding.h"
#include "decoder/decoding_read_memory.h"

namespace lmdecode::decoder {
namespace {

constexpr const char* kStepsOp = "decoding_steps_";
constexpr const char* kWorkspaceOp = "decoding_workspace_bytes";

// Checks an unfinished search, before anything is written.
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
  if (p.dialect != beam::BeamDialect::kScorer && !p.greedy) {
    check_number(kStepsOp, "parameters.pad_tokens", slot, p.parameters.pad_tokens[slot], 0,
                 p.config.vocab - 1);
  }
  // Uncached tokens are read as the request's prompt, for all of its groups at once.
  const int64_t first_slot = request * p.num_groups;
  const int64_t padding = p.padding(slot), cached = p.cached_lengths[request] + padding;
  if (cached < length - 1 && (!p.is_running(first_slot) || state.lengths[first_slot] != length)) {
    fail(kStepsOp, "caches.cached_lengths[", request, "] is ", p.cached_lengths[request],
         "; expected ", length - 1 - padding, ", since slot ", slot, " goes on alone");
  }
  const int64_t rows = slot * state.beams;
  for (int64_t beam = 0; beam < p.parameters.num_beams[slot]; ++beam) {
    const int64_t* const tokens = state.sequences + (rows + beam) * state.capacity;
    const int64_t begin = beam == 0 ? cached : length - 1;
    for (int64_t i = begin < length ? begin : length - 1; i < length; ++i) {
      if (tokens[i] >= 0 && tokens[i] < p.config.vocab) continue;
      fail(kStepsOp, "state.sequences[", slot, ", ", beam, ", ", i, "] is ", tokens[i],
           "; expected a token, 0 to ", p.config.vocab - 1);
    }
    const int32_t* const table = p.caches.table + (rows + beam) * state.capacity;
    for (int64_t i = 0; i < p.cached_lengths[request] && i < length - 1 - padding; ++i) {
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
  const bool has_scores = logits.dim() == 3 && logits.size(0) == 2;
  if ((logits.dim() != 2 && !has_scores) || logits.size(logits.dim() - 2) != rows ||
      logits.size(logits.dim() - 1) != vocab) {
    fail(kStepsOp, "logits has shape ", shape_text(logits), "; expected ",
         sizes_text({rows, vocab}), " or ", sizes_text({2, rows, vocab}));
  }
  const Arguments arguments(kStepsOp);
  arguments.check_device("logits", logits);
  arguments.check_contiguous("logits", logits);
}

Tensor decoding_steps(const Tensor& embedding, const Tensor& weights, const Tensors& state,
                      const Tensors& parameters, const Tensors& rules, const Tensors& caches,
                      const Tensor& workspace, const Integers& options,
                      const std::optional<Tensor>& logits) {
  const char* const op = kStepsOp;
  const auto& model = checked_model<DecoderModel>(op, weights);
  const CacheTensors cache(op, caches, model.config);
  DecodingParams p;
  p.config = model.config;
  p.weights = model.with(op, embedding);
  const Arguments arguments = beam::state_arguments(op, state);
  const Tensor& first = state[0];
  p.state = beam::beam_search_state(arguments, state);
  p.parameters = beam::beam_search_parameters(arguments, parameters, p.state.slots);
  IntegerList list(op, "options", options, 7);
  p.dialect = static_cast<beam::BeamDialect>(list.next("rules", 0, 2));
  p.greedy = list.next_flag("greedy");
  p.num_groups = list.next("num_groups", 1);
  p.num_candidates = list.next("num_candidates", 1, (int64_t{1} << 24));
  p.max_steps = list.next("max_steps", 0, INT64_MAX);
  p.stop_when_done = list.next_flag("stop_when_done");
  p.chooses = list.next_flag("chooses");
  p.token_rules = token_rules(Arguments(op), rules, p.state.slots, model.config.vocab);
  const std::vector<beam::TokenTrie> tries = add_tries(Arguments(op), rules, &p.token_rules);
  if (!tries.empty() && p.dialect == beam::BeamDialect::kScorer) {
    fail(op, "token_rules has tries; expected none with the rules \"scorer\"");
  }
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
    // Steps write to logits between reading these.
    const auto check_apart_from = [&](const char* name, const Tensors& tensors) {
      for (const Tensor& tensor : tensors) check_apart(op, "logits", *logits, name, tensor);
    };
    check_apart_from("weights", {embedding, weights});
    check_apart_from("state", state);
    check_apart_from("parameters", parameters);
    check_apart_from("token_rules", rules);
    check_apart_from("caches", caches);
    check_apart_from("workspace", {workspace});
    p.logits = static_cast<float*>(logits->mutable_data_ptr());
    if (logits->dim() == 3) p.scores = p.logits + p.cache_rows() * p.config.vocab;
  }
  return new_integer(first, decoding_steps_cpu(p));
}

// sizes: slots, beams, capacity, num_groups, num_candidates, num_bans
Tensor decoding_workspace(const Tensor& weights, const Integers& sizes) {
  IntegerList list(kWorkspaceOp, "sizes", sizes, 6);
  DecodingParams p;
  p.config = checked_model<DecoderModel>(kWorkspaceOp, weights).config;
  p.state.slots = list.next("slots", 0);
  p.state.beams = list.next("beams", 1);
  p.state.capacity = list.next("capacity", 0);
  p.num_groups = list.next("num_groups", 1);
  p.num_candidates = list.next("num_candidates", 1);
  p.token_rules.num_bans = list.next("num_bans", 0);
  return new_integer(weights, static_cast<int64_t>(decoding_workspace_bytes(p)));
}

constexpr const char* kReadOp = "decoding_read_memory_";

void read_memory(const Tensor& weights, const Tensors& caches, const Tensor& memory,
                 const Tensor& lengths, const Tensor& requests) {
  const char* const op = kReadOp;
  const auto& model = checked_model<DecoderModel>(op, weights);
  const DecoderConfig& c = model.config;
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
  ReadMemoryParams p;
  p.config = c;
  p.layers = model.layers.data();
  p.count = count;
  p.source = source;
  p.memory = static_cast<const float*>(memory.const_data_ptr());
  p.lengths = length;
  p.length_stride = lengths.stride(0);
  p.requests = request;
  p.request_stride = requests.stride(0);
  p.cache_requests = cache.caches.requests;
  p.cache_source = cache.caches.source;
  p.cross_keys = cache.cross_keys;
  p.cross_values = cache.cross_values;
  p.memory_lengths = cache.memory_lengths;
  p.cached_lengths = cache.cached_lengths;
  const int64_t bytes = static_cast<int64_t>(read_memory_workspace_bytes(p));
  Tensor workspace = new_tensor(memory, {bytes}, ScalarType::Byte);
  p.workspace = workspace.mutable_data_ptr();
  decoding_read_memory_cpu(p);
}

}  // namespace
}  // namespace lmdecode::decoder

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("decoding_read_memory_", TORCH_BOX(&lmdecode::decoder::read_memory));
  m.impl("decoding_workspace_bytes", TORCH_BOX(&lmdecode::decoder::decoding_workspace));
  m.impl("decoding_steps_", TORCH_BOX(&lmdecode::decoder::decoding_steps));
}
