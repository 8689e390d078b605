// beam_search_step_ on CPU tensors.
#include "beam/search_step.h"
#include "bindings/beam_slot_checks.h"
#include "bindings/token_rule_checks.h"
#include "common/split_memory.h"

namespace lmdecode::beam {
namespace {

using decoder::check_number;
using decoder::Tensors;

constexpr const char* kOp = "beam_search_step_";
constexpr int64_t kSearchNumbers = sizeof(SearchOfStep) / sizeof(int64_t);

// What the step is told of each search, and the slots that these are in, each once.
void check_searches(const SearchStepParams& p, int64_t rule_rows) {
  const RequestRows<int64_t> slots = {p.count > 0 ? &p.searches[0].slot : nullptr, kSearchNumbers,
                                      1};
  check_slots(kOp, slots, p.count, p.state.slots);
  std::vector<uint8_t> is_taken(static_cast<size_t>(p.next_rows));
  int64_t next_rows = 0;
  for (int64_t i = 0; i < p.count; ++i) {
    const SearchOfStep& s = p.searches[i];
    check_slot(kOp, p.state, p.parameters, s.slot, -1);
    if (p.state.done[s.slot] == 0 && p.state.lengths[s.slot] >= p.state.capacity) {
      fail(kOp, "state.lengths[", s.slot, "] is ", p.state.lengths[s.slot],
           "; expected less than the capacity of the state, ", p.state.capacity,
           ", where a search goes on");
    }
    const int64_t beams = p.parameters.num_beams[s.slot];
    check_number(kOp, "searches.rule_row", i, s.rule_row, 0, rule_rows - 1);
    check_number(kOp, "searches.group", i, s.group, 0, INT64_MAX);
    check_number(kOp, "searches.rules", i, s.rules, 0, static_cast<int64_t>(BeamRules::kFairseq));
    if (s.num_rows != 1) check_number(kOp, "searches.num_rows", i, s.num_rows, beams, beams);
    check_number(kOp, "searches.first_row", i, s.first_row, 0, p.rows - s.num_rows);
    check_number(kOp, "searches.next_row", i, s.next_row, 0, p.next_rows - beams);
    check_number(kOp, "searches.num_earlier", i, s.num_earlier, 0, s.next_row);
    next_rows += beams;
    for (int64_t row = s.next_row; row < s.next_row + beams; ++row) {
      if (is_taken[static_cast<size_t>(row)]++ == 0) continue;
      fail(kOp, "searches.next_row[", i, "] is ", s.next_row, "; expected beams of its own, row ",
           row, " is another search's");
    }
  }
  if (next_rows != p.next_rows) {
    fail(kOp, "next_rows is ", p.next_rows, "; expected the beams of all searches, ", next_rows);
  }
}

SearchStepSizes sizes_of(const SearchStepParams& p) {
  SearchStepSizes sizes;
  sizes.searches = p.count;
  sizes.rows = std::max(p.rows, p.next_rows);
  sizes.num_candidates = p.num_candidates;
  sizes.num_bans = p.token_rules.num_bans;
  for (int64_t i = 0; i < p.count; ++i) {
    sizes.num_earlier = std::max(sizes.num_earlier, p.searches[i].num_earlier);
  }
  sizes.capacity = p.state.capacity;
  sizes.vocab = p.vocab;
  return sizes;
}

// Candidates and decisions go to the caller's tensors or, where there are none, to the block.
void place_candidates(const Tensors& trace, SplitMemory* block, SearchStepParams* p) {
  const int64_t n = p->count, k = p->num_candidates;
  if (trace.empty()) {
    block->take(&p->scores, n * k);
    block->take(&p->log_probs, n * k);
    block->take(&p->tokens, n * k);
    block->take(&p->beams, n * k);
    block->take(&p->decisions, n * k);
    block->take(&p->status, n);
    return;
  }
  decoder::TensorList list(kOp, "trace", trace, 6);
  p->scores = list.next<float>("scores", {n, k});
  p->log_probs = list.next<float>("log_probs", {n, k});
  p->tokens = list.next<int64_t>("tokens", {n, k});
  p->beams = list.next<int64_t>("beams", {n, k});
  p->decisions = list.next<int32_t>("decisions", {n, k});
  p->status = list.next<uint8_t>("status", {n});
}

// What a step writes may be none of what it goes by. The spans are asked for once a step.
void check_written_apart(const std::vector<Tensor>& state, const Tensor& nodes,
                         const Tensors& trace, const std::vector<Tensor>& parameters,
                         const Tensor& searches) {
  std::vector<MemorySpan> written;
  written.reserve(state.size() + trace.size() + 1);
  for (const Tensor& tensor : state) written.emplace_back(tensor);
  for (const Tensor& tensor : trace) written.emplace_back(tensor);
  written.emplace_back(nodes);
  const auto check = [&](const char* name, const Tensor& tensor) {
    const MemorySpan read(tensor);
    for (const MemorySpan& memory : written) {
      if (!read.meets(memory)) continue;
      fail(kOp, name, " shares memory with what is written; expected a tensor of its own");
    }
  };
  for (const Tensor& tensor : parameters) check("parameters", tensor);
  check("searches", searches);
}

std::tuple<Tensor, Tensor, Tensor> beam_search_step(
    const Tensor& logits, const std::vector<Tensor>& state, const std::vector<Tensor>& parameters,
    const std::vector<Tensor>& rules, const Tensor& searches, const Tensor& nodes,
    int64_t num_candidates, int64_t next_rows, const OptionalTensor& token_bitmask,
    const OptionalTensor& bonus, const std::vector<Tensor>& trace) {
  SearchStepParams p;
  const Arguments arguments = state_arguments(kOp, state);
  const Tensor& first = state[0];
  p.state = beam_search_state(arguments, state);
  p.parameters = beam_search_parameters(arguments, parameters, p.state.slots);
  check_rank(kOp, "logits", logits, 2, "[rows, vocab]");
  arguments.check_device("logits", logits);
  p.dtype = float_dtype(kOp, "logits", logits);
  p.rows = logits.size(0);
  p.vocab = logits.size(1);
  if (p.vocab < 1 || p.vocab >= (int64_t{1} << 31)) {
    fail(kOp, "logits has shape ", shape_text(logits),
         "; expected a vocabulary of 1 to 2^31 - 1 tokens");
  }
  p.logits = const_cast<void*>(logits.const_data_ptr());
  p.logits_row_stride = logits.stride(0);
  p.logits_vocab_stride = logits.stride(1);
  if (rules.empty()) fail(kOp, "token_rules has 0 tensors; expected ", decoder::kRuleTensors);
  check_rank(kOp, "token_rules.repetition_penalty", rules[0], 1, "[rows]");
  const int64_t rule_rows = rules[0].size(0);
  p.token_rules = decoder::token_rules(kOp, rules, rule_rows, p.vocab);
  const std::vector<TokenTrie> tries = decoder::tries_of_rows(kOp, rules, rule_rows);
  if (!tries.empty()) p.token_rules.tries = tries.data();
  for (int64_t row = 0; row < rule_rows; ++row) {
    if (!p.token_rules.timestamp_rule(row).is_on()) continue;
    fail(kOp, "token_rules.timestamps[", row, "] is on; expected -1: only a decoder has the rule");
  }
  check_rank(kOp, "searches", searches, 2, "[n, 8]");
  p.count = searches.size(0);
  p.searches = reinterpret_cast<const SearchOfStep*>(arguments.contiguous<const int64_t>(
      "searches", searches, {p.count, kSearchNumbers}, "[n, 8]"));
  p.nodes = arguments.contiguous<int32_t>("nodes", nodes, {p.state.slots, p.state.beams},
                                          "[slots, beams] of the state");
  check_number(kOp, "num_candidates", 0, num_candidates, 1, (int64_t{1} << 24));
  p.num_candidates = num_candidates;
  check_number(kOp, "next_rows", 0, next_rows, 0, (int64_t{1} << 31));
  p.next_rows = next_rows;
  constexpr int64_t kMost = int64_t{1} << 31;
  if (p.rows >= kMost || std::max(p.rows, p.next_rows) * num_candidates >= kMost) {
    fail(kOp, "num_candidates is ", num_candidates, " for ", p.rows,
         " rows; expected fewer than 2^31 candidates of all rows together");
  }
  check_searches(p, rule_rows);
  if (token_bitmask) {
    p.token_bitmask = arguments.strided<const int32_t>("token_bitmask", *token_bitmask,
                                                       {p.rows, (p.vocab + 31) / 32});
    p.bitmask_row_stride = token_bitmask->stride(0);
    p.bitmask_stride = token_bitmask->stride(1);
  }
  if (bonus) {
    p.bonus = arguments.contiguous<const float>("bonus", *bonus, {p.count, p.state.beams},
                                                "[searches, beams of the state]");
  }
  check_written_apart(state, nodes, trace, parameters, searches);
  const SearchStepSizes sizes = sizes_of(p);
  SplitMemory count(nullptr);
  SearchStepParams counted = p;
  place_candidates(trace, &count, &counted);
  const size_t step_bytes = search_step_workspace_bytes(sizes);
  constexpr size_t kAlignment = 64;
  const Tensor memory = new_tensor(
      first, {static_cast<int64_t>(count.used() + step_bytes + kAlignment)}, ScalarType::Byte);
  char* const aligned = static_cast<char*>(memory.mutable_data_ptr()) + kAlignment -
                        reinterpret_cast<uintptr_t>(memory.mutable_data_ptr()) % kAlignment;
  SplitMemory block(aligned);
  place_candidates(trace, &block, &p);
  Tensor tokens = new_tensor(first, {p.next_rows}, ScalarType::Long);
  Tensor parents = new_tensor(first, {p.next_rows}, ScalarType::Long);
  Tensor ended = new_tensor(first, {p.count}, ScalarType::Long);
  p.next_tokens = tokens.mutable_data_ptr<int64_t>();
  p.next_parents = parents.mutable_data_ptr<int64_t>();
  search_step_cpu(p, sizes, aligned + block.used());
  for (int64_t i = 0; i < p.count; ++i) {
    const int64_t slot = p.searches[i].slot;
    ended.mutable_data_ptr<int64_t>()[i] = p.state.status[slot] != 0 ? 2 : p.state.done[slot];
  }
  return {tokens, parents, ended};
}

}  // namespace
}  // namespace lmdecode::beam

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("beam_search_step_", TORCH_BOX(&lmdecode::beam::beam_search_step));
}
