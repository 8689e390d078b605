// causal_forward_, causal_steps_ and causal_workspace_bytes, on CPU tensors alone.
#include "decoder/causal_forward.h"

#include <algorithm>
#include <chrono>

#include "bindings/causal_checks.h"
#include "bindings/kv_cache_checks.h"
#include "bindings/sampler_checks.h"

namespace lmdecode::decoder {
namespace {

constexpr const char* kForwardOp = "causal_forward_";
constexpr const char* kStepsOp = "causal_steps_";
constexpr const char* kBytesOp = "causal_workspace_bytes";

// Blocks that sequences name, as far back as layers look: caches may keep more of windows, so that
// sequences can go back.
void check_table(const CausalForwardParams& p, int64_t number) {
  PagedCache cache = p.caches[number];
  if (cache.window != 0) {
    int64_t seen = 1;
    for (int64_t i = 0; i < p.model->config.layers; ++i) {
      const CausalLayer& layer = p.model->layers[i];
      if (layer.cache == number) seen = std::max(seen, layer.window);
    }
    cache.window = seen;
  }
  const kv_cache::BlockTable& table = cache.table;
  for (int64_t row = 0; row < table.rows; ++row) {
    check_blocks(kForwardOp, "caches.blocks", table, row, 0,
                 cache.first_kept_block(table.lengths[row]));
  }
}

// Entries and their tokens; returns how many logits are wanted.
int64_t check_entries(const CausalForwardParams& p, int64_t num_tokens) {
  const CausalModel& m = *p.model;
  const kv_cache::BlockTable& table = p.caches[0].table;
  int64_t most = table.max_blocks * table.block_size;
  for (int64_t i = 1; i < p.num_caches; ++i) {
    const kv_cache::BlockTable& other = p.caches[i].table;
    most = std::min(most, other.max_blocks * other.block_size);
  }
  std::vector<int64_t> added(static_cast<size_t>(table.rows), 0);
  int64_t tokens = 0, logits = 0;
  for (int64_t i = 0; i < p.num_entries; ++i) {
    const CausalEntry& entry = p.entries[i];
    const auto check = [&](const char* name, int64_t value, int64_t low, int64_t high) {
      if (value >= low && value <= high) return;
      fail(kForwardOp, "entries[", i, "].", name, " is ", value, "; expected ", low, " to ", high);
    };
    check("sequence", entry.sequence, 0, table.rows - 1);
    const int64_t length = table.lengths[entry.sequence];
    check("count", entry.count, 1, most - length);
    check("is_prompt", entry.is_prompt, 0, 1);
    check("num_logits", entry.num_logits, 0, entry.count);
    if (added[static_cast<size_t>(entry.sequence)] != 0) {
      fail(kForwardOp, "entries[", i, "].sequence is ", entry.sequence,
           " once more; expected each at most once");
    }
    added[static_cast<size_t>(entry.sequence)] = entry.count;
    if (m.mixer.kind != MixerKind::kNone && length > 0 &&
        p.states.slots.find(entry.sequence, length) == kv_cache::kNoSlot) {
      fail(kForwardOp, "entries[", i, "].sequence has ", length,
           " positions, and no state behind them; expected one");
    }
    if (m.weights.positions != nullptr && length + entry.count > m.weights.num_positions) {
      fail(kForwardOp, "entries[", i, "] ends at position ", length + entry.count,
           "; expected at most ", m.weights.num_positions, ", what the model has");
    }
    tokens += entry.count;
    logits += entry.num_logits;
  }
  if (tokens != num_tokens) {
    fail(kForwardOp, "tokens has ", num_tokens, " entries; expected ", tokens, ", as entries say");
  }
  for (int64_t i = 0; i < tokens; ++i) {
    if (p.tokens[i] >= 0 && p.tokens[i] < m.config.vocab) continue;
    fail(kForwardOp, "tokens[", i, "] is ", p.tokens[i], "; expected 0 to ", m.config.vocab - 1);
  }
  kv_cache::IntegerRows counts;
  counts.data = added.data();
  for (int64_t cache = 0; cache < p.num_caches; ++cache) {
    const kv_cache::BlockTable& blocks = p.caches[cache].table;
    int64_t most_taken = 0;
    for (int64_t row = 0; row < blocks.rows; ++row) {
      most_taken += most_blocks_taken(blocks, row, counts.at(row));
    }
    check_free_blocks(kForwardOp, "caches.free_blocks", blocks, most_taken);
    if (p.caches[cache].window != 0) continue;  // those let go of blocks meanwhile
    const int64_t missing = missing_blocks(blocks, counts);
    if (missing == 0) continue;
    fail(kForwardOp, "caches.pool has ", blocks.num_blocks, " blocks; expected ", missing,
         " more for ", tokens, " tokens");
  }
  return logits;
}

void check_layers(const CausalForwardParams& p) {
  const DecoderConfig& c = p.model->config;
  if (p.model->mixer.kind != MixerKind::kNone && p.states.state_size == 0) {
    fail(kForwardOp, "caches has no states; expected those of layers with a mixer");
  }
  for (int64_t i = 0; i < c.layers; ++i) {
    const CausalLayer& layer = p.model->layers[i];
    const int64_t end = layer.state + p.model->mixer.state_size();
    if (layer.has_state() && end > p.states.state_size) {
      fail(kForwardOp, "layers.", i, " has a state that ends at ", end,
           "; expected caches.states with so many numbers, not ", p.states.state_size);
    }
    if (!layer.has_attention()) continue;
    const bool is_there =
        layer.cache < p.num_caches && layer.cache_layer < p.caches[layer.cache].layers;
    const int64_t kept = is_there ? p.caches[layer.cache].window : 0;
    const bool fits = kept == 0 || (layer.window != attention::kUnlimited && layer.window <= kept);
    if (!is_there || !fits) {
      fail(kForwardOp, "layers.", i, " has layer ", layer.cache_layer, " of cache ", layer.cache,
           "; expected one that caches have, with its window at least");
    }
    const PagedCache& cache = p.caches[layer.cache];
    if (cache.kv_heads == layer.heads.kv_heads && cache.head_size == layer.heads.size) continue;
    fail(kForwardOp, "caches.pool has ", cache.kv_heads, " heads of ", cache.head_size,
         "; expected ", layer.heads.kv_heads, " of ", layer.heads.size);
  }
}

// Rows of all tokens: given where the model has a projection of them, and taken.
void check_hidden(const Arguments& arguments, int64_t num_tokens, const OptionalTensor& hidden_in,
                  const OptionalTensor& hidden_out, CausalForwardParams* p) {
  const int64_t size = p->model->config.model_size;
  const bool is_needed = p->model->hidden_input.is_there();
  if (hidden_in.has_value() != is_needed) {
    fail(kForwardOp, "hidden_in is ", is_needed ? "None" : "given", "; expected ",
         is_needed ? "it, as" : "None, as", " the weights have ", is_needed ? "a" : "no",
         " projection of it");
  }
  if (is_needed) {
    p->hidden_in = arguments.contiguous<const float>("hidden_in", *hidden_in, {num_tokens, size});
  }
  if (hidden_out.has_value()) {
    p->hidden_out = arguments.contiguous<float>("hidden_out", *hidden_out, {num_tokens, size});
  }
}

Tensor causal_forward(const Tensor& memory, const Tensors& caches, const Integers& windows,
                      const Tensor& workspace, const Tensor& tokens, const Tensor& entries,
                      int64_t num_logits, int64_t vocab_size, int64_t max_rows,
                      const OptionalTensor& hidden_in, const OptionalTensor& hidden_out) {
  const char* const op = kForwardOp;
  const CausalModel& model = checked_model<CausalWeightsModel>(op, memory).model;
  CausalForwardParams p;
  p.model = &model;
  const CausalCacheList found = causal_caches(op, caches, windows);
  std::copy_n(found.caches, kMaxPagedCaches, p.caches);
  p.num_caches = found.count;
  p.states = found.states;
  check_layers(p);
  for (int64_t i = 0; i < p.num_caches; ++i) check_table(p, i);
  const Arguments arguments(op);
  check_rank(op, "entries", entries, 2, "[entries, 4]");
  p.tokens = arguments.contiguous<const int64_t>("tokens", tokens, {-1});
  static_assert(sizeof(CausalEntry) == 4 * sizeof(int64_t));
  p.entries = reinterpret_cast<const CausalEntry*>(
      arguments.contiguous<const int64_t>("entries", entries, {-1, 4}));
  p.num_entries = entries.size(0);
  const int64_t logits = check_entries(p, tokens.numel());
  if (num_logits != logits) {
    fail(op, "num_logits is ", num_logits, "; expected ", logits, ", as entries say");
  }
  if (vocab_size != model.config.vocab) {
    fail(op, "vocab_size is ", vocab_size, "; expected ", model.config.vocab, ", from config");
  }
  if (max_rows < 1 || max_rows > (1 << 20)) {
    fail(op, "max_rows is ", max_rows, "; expected 1 to 2^20");
  }
  p.max_rows = max_rows;
  check_hidden(arguments, tokens.numel(), hidden_in, hidden_out, &p);
  check_dtype(op, "workspace", workspace, ScalarType::Byte);
  const int64_t bytes = static_cast<int64_t>(
      causal_workspace_bytes(model, max_rows, p.sequences(), p.caches[0].table.max_blocks));
  if (!workspace.is_cpu() || !workspace.is_contiguous() || workspace.numel() < bytes ||
      reinterpret_cast<uintptr_t>(workspace.const_data_ptr()) % 64 != 0) {
    fail(op, "workspace has ", workspace.numel(), " bytes on ", device_name(workspace),
         "; expected at least ", bytes, " on cpu, aligned to 64");
  }
  p.workspace = workspace.mutable_data_ptr();
  Tensor out = new_tensor(workspace, {num_logits, model.config.vocab}, ScalarType::Float);
  p.logits = static_cast<float*>(out.mutable_data_ptr());
  causal_forward_cpu(p);
  return out;
}

// Each row reads its last token and chooses the next, step after step; nothing returns to Python.
Tensor causal_steps(const Tensor& memory, const Tensors& caches, const Integers& windows,
                    const Tensor& workspace, const Tensor& tokens, const Tensor& entries,
                    int64_t max_rows, const Tensor& state, int64_t text_capacity,
                    int64_t rules_capacity, const Tensor& results, const Tensor& ends,
                    Tensor chosen, double seconds) {
  const char* const op = kStepsOp;
  const Arguments arguments(op);
  const int64_t rows = tokens.numel();
  check_rank(op, "ends", ends, 2, "[rows, ends]");
  check_rank(op, "chosen", chosen, 2, "[steps, rows]");
  const auto* const last = arguments.contiguous<const int64_t>("tokens", tokens, {rows});
  const auto* const of_entries = reinterpret_cast<const CausalEntry*>(
      arguments.contiguous<const int64_t>("entries", entries, {rows, 4}));
  const auto* const of_rows = arguments.contiguous<const int64_t>("ends", ends, {rows, -1});
  auto* const out = arguments.contiguous<int64_t>("chosen", chosen, {-1, rows});
  for (int64_t row = 0; row < rows; ++row) {
    if (of_entries[row].count == 1 && of_entries[row].num_logits == 1) continue;
    fail(op, "entries[", row, "] has ", of_entries[row].count, " tokens and ",
         of_entries[row].num_logits, " rows of logits; expected 1 of each");
  }
  const int64_t vocab = checked_model<CausalWeightsModel>(op, memory).model.config.vocab;
  check_rank(op, "state", state, 2, "[rows, bytes]");
  if (state.size(0) != rows) {
    fail(op, "state has ", state.size(0), " rows; expected ", rows, ", as tokens has");
  }
  const int64_t most = chosen.size(0);
  sampling::SamplerStepParams p =
      sampling::drawing_rows(arguments, state, vocab, text_capacity, rules_capacity, results, most);
  const int64_t num_ends = ends.size(1);
  const auto has_ended = [&](int64_t row) {
    const int64_t* const begin = of_rows + row * num_ends;
    return p.status[row] != 0 ||
           std::find(begin, begin + num_ends, p.index[row]) != begin + num_ends;
  };
  Tensor read = new_tensor(tokens, {rows}, ScalarType::Long);  // results may be where tokens are
  auto* const next = static_cast<int64_t*>(read.mutable_data_ptr());
  std::copy_n(last, rows, next);
  using Clock = std::chrono::steady_clock;
  const auto begun = Clock::now();
  int64_t taken = 0;
  for (bool goes_on = rows > 0; goes_on && taken < most; ++taken) {
    const Tensor logits = causal_forward(memory, caches, windows, workspace, read, entries, rows,
                                         vocab, max_rows, std::nullopt, std::nullopt);
    if (taken > 0) sampling::check_state(op, "state", state, p.layout);  // as before a first step
    p.logits = logits.const_data_ptr();
    sampling::sampler_step_cpu(p);
    std::copy_n(p.index, rows, next);
    std::copy_n(p.index, rows, out + taken * rows);
    for (int64_t row = 0; row < rows; ++row) goes_on &= !has_ended(row);
    goes_on &= std::chrono::duration<double>(Clock::now() - begun).count() < seconds;
  }
  return new_integer(tokens, taken);
}

// sizes: max_rows, sequences, blocks of a sequence.
Tensor workspace_bytes(const Tensor& memory, const Integers& sizes) {
  const CausalModel& model = checked_model<CausalWeightsModel>(kBytesOp, memory).model;
  IntegerList list(kBytesOp, "sizes", sizes, 3);
  const int64_t max_rows = list.next("max_rows", 1, 1 << 20);
  const int64_t sequences = list.next("sequences", 1, 1 << 20);
  const int64_t max_blocks = list.next("max_blocks", 1, 1 << 24);
  return new_integer(
      memory, static_cast<int64_t>(causal_workspace_bytes(model, max_rows, sequences, max_blocks)));
}

}  // namespace
}  // namespace lmdecode::decoder

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("causal_forward_", TORCH_BOX(&lmdecode::decoder::causal_forward));
  m.impl("causal_workspace_bytes", TORCH_BOX(&lmdecode::decoder::workspace_bytes));
  m.impl("causal_steps_", TORCH_BOX(&lmdecode::decoder::causal_steps));
}
