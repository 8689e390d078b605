// beam_search_step_ on either device.
#include "beam/search_pass.h"
#include "bindings/beam_search_checks.h"
#include "bindings/device.h"
#include "bindings/token_rule_checks.h"
#include "common/split_memory.h"

namespace lmdecode::beam {
namespace {

using decoder::check_number;
using decoder::Tensors;

constexpr const char* kOp = "beam_search_step_";
constexpr int64_t kSearchNumbers = sizeof(SearchOfStep) / sizeof(int64_t);

// Three numbers for each pass: the fields of PassOfStep.
std::vector<PassOfStep> passes_of_step(const decoder::Integers& numbers,
                                       const SearchStepParams& p) {
  if (numbers.size() % 3 != 0) {
    fail(kOp, "passes has ", numbers.size(), " numbers; expected three for each pass");
  }
  std::vector<PassOfStep> passes(numbers.size() / 3);
  int64_t searches = 0;
  for (size_t i = 0; i < passes.size(); ++i) {
    const int64_t* const pass = numbers.data() + 3 * i;
    const int64_t number = static_cast<int64_t>(i);
    check_number(kOp, "passes.searches", number, pass[0], 0, p.count - searches);
    // Each has a row of the logits at least, and of the beams that there are at most.
    check_number(kOp, "passes.rows", number, pass[1], pass[0],
                 p.rows == 0 ? 0 : std::max(p.rows, p.next_rows));
    check_number(kOp, "passes.num_earlier", number, pass[2], 0, p.next_rows);
    passes[i] = {pass[0], pass[1], pass[2]};
    searches += pass[0];
  }
  if (searches != p.count) {
    fail(kOp, "passes has ", searches, " searches; expected all of searches, ", p.count);
  }
  return passes;
}

// Checks the numbers of one search of a pass; its rows begin at pass_row.
void check_search(const SearchStepParams& p, const PassOfStep& pass, int64_t i, int64_t pass_row) {
  const SearchOfStep& s = p.searches[i];
  check_slot(kOp, p.state, p.parameters, s.slot, -1);
  if (p.state.done[s.slot] == 0 && p.state.lengths[s.slot] >= p.state.capacity) {
    fail(kOp, "state.lengths[", s.slot, "] is ", p.state.lengths[s.slot],
         "; expected less than the capacity of the state, ", p.state.capacity,
         ", where a search goes on");
  }
  const int64_t beams = p.parameters.num_beams[s.slot];
  if (p.greedy) check_number(kOp, "parameters.num_beams", s.slot, beams, 1, 1);
  check_number(kOp, "searches.rule_row", i, s.rule_row, 0, p.token_rules.rows - 1);
  check_number(kOp, "searches.rules", i, s.dialect, 0, static_cast<int64_t>(BeamDialect::kFairseq));
  if (s.num_rows != 1) check_number(kOp, "searches.num_rows", i, s.num_rows, beams, beams);
  check_number(kOp, "searches.first_row", i, s.first_row, 0, p.rows - s.num_rows);
  check_number(kOp, "searches.pass_row", i, s.pass_row, pass_row, pass_row);
  check_number(kOp, "searches.next_row", i, s.next_row, 0, p.next_rows - beams);
  check_number(kOp, "searches.next_end", i, s.next_end, s.next_row + beams, s.next_row + beams);
  check_number(kOp, "searches.num_earlier", i, s.num_earlier, 0,
               std::min(s.next_row, pass.num_earlier));
}

// Checks the numbers of all searches, and that each slot occurs once.
void check_searches(const SearchStepParams& p) {
  const RequestRows<int64_t> slots = {p.count > 0 ? &p.searches[0].slot : nullptr, kSearchNumbers,
                                      1};
  check_slots(kOp, slots, p.count, p.state.slots);
  std::vector<uint8_t> is_taken(static_cast<size_t>(p.next_rows));
  int64_t i = 0, next_rows = 0;
  for (int64_t number = 0; number < p.num_passes; ++number) {
    const PassOfStep& pass = p.passes[number];
    int64_t pass_row = 0;
    for (const int64_t end = i + pass.searches; i < end; ++i) {
      check_search(p, pass, i, pass_row);
      const SearchOfStep& s = p.searches[i];
      pass_row += s.num_rows;
      next_rows += s.next_end - s.next_row;
      for (int64_t row = s.next_row; row < s.next_end; ++row) {
        if (is_taken[static_cast<size_t>(row)]++ == 0) continue;
        fail(kOp, "searches.next_row[", i, "] is ", s.next_row, "; expected beams of its own, row ",
             row, " is another search's");
      }
    }
    check_number(kOp, "passes.rows", number, pass.rows, pass_row, pass_row);
  }
  if (next_rows != p.next_rows) {
    fail(kOp, "next_rows is ", p.next_rows, "; expected the beams of all searches, ", next_rows);
  }
}

SearchStepSizes sizes_of(const SearchStepParams& p) {
  SearchStepSizes sizes;
  for (int64_t i = 0; i < p.num_passes; ++i) {
    const PassOfStep& pass = p.passes[i];
    sizes.searches = std::max(sizes.searches, pass.searches);
    sizes.rows = std::max(sizes.rows, pass.rows);
    sizes.num_earlier = std::max(sizes.num_earlier, pass.num_earlier);
  }
  sizes.next_rows = p.next_rows;
  sizes.num_candidates = p.num_candidates;
  sizes.num_bans = p.token_rules.num_bans;
  sizes.num_tries = p.token_rules.num_tries;
  const RulesOfPass rules = possible_rules(p, sizes.num_earlier);
  sizes.has_rules = rules.any_but_tries() || rules.has_tries;
  sizes.is_row_by_row = p.greedy;
  sizes.capacity = p.state.capacity;
  sizes.vocab = p.vocab;
  return sizes;
}

// The rows of a greedy step on the CPU, which the rules change.
Tensor copied_logits(const Tensor& logits, SearchStepParams* p) {
  Tensor copy = new_tensor(logits, {p->rows, p->vocab}, ScalarType::Float);
  float* to = copy.mutable_data_ptr<float>();
  const auto copy_rows = [&]<class T>(const T* from) {
    for (int64_t row = 0; row < p->rows; ++row) {
      const T* const logit = from + row * p->logits_row_stride;
      for (int64_t i = 0; i < p->vocab; ++i) *to++ = to_float(logit[i * p->logits_vocab_stride]);
    }
  };
  switch (p->dtype) {
    case DType::kFloat32:
      copy_rows(static_cast<const float*>(p->logits));
      break;
    case DType::kFloat16:
      copy_rows(static_cast<const Half*>(p->logits));
      break;
    case DType::kBFloat16:
      copy_rows(static_cast<const BFloat16*>(p->logits));
      break;
  }
  p->logits = copy.mutable_data_ptr();
  p->dtype = DType::kFloat32;
  p->logits_row_stride = p->vocab;
  p->logits_vocab_stride = 1;
  return copy;
}

// Candidates and decisions go to the caller's tensors or, where there are none, to the block.
void place_candidates(const Arguments& arguments, const Tensors& trace, SplitMemory* block,
                      SearchStepParams* p) {
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
  decoder::TensorList list(arguments, "trace", trace, 6);
  p->scores = list.next<float>("scores", {n, k});
  p->log_probs = list.next<float>("log_probs", {n, k});
  p->tokens = list.next<int64_t>("tokens", {n, k});
  p->beams = list.next<int64_t>("beams", {n, k});
  p->decisions = list.next<int32_t>("decisions", {n, k});
  p->status = list.next<uint8_t>("status", {n});
}

// Outputs of a step must not overlap its inputs. The spans are computed once a step.
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
    const decoder::Integers& passes, int64_t num_candidates, int64_t next_rows,
    const OptionalTensor& token_bitmask, const OptionalTensor& bonus, bool fills_missing,
    bool greedy, const std::vector<Tensor>& trace) {
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
  if (rules.size() < decoder::kRuleTensors) {
    fail(kOp, "token_rules has ", rules.size(), " tensors; expected ", decoder::kRuleTensors);
  }
  check_rank(kOp, "token_rules.bans", rules[3], 3, "[rows, bans, 4]");
  p.token_rules = decoder::token_rules(arguments, rules, rules[3].size(0), p.vocab);
  const std::vector<TokenTrie> tries = decoder::add_tries(arguments, rules, &p.token_rules);
  for (int64_t row = 0; row < p.token_rules.rows && !kIsCuda; ++row) {
    if (!p.token_rules.timestamp_rule(row).is_on()) continue;
    fail(kOp, "token_rules.timestamps[", row, "] is on; expected -1: only a decoder has the rule");
  }
  p.fills_missing = fills_missing;
  p.greedy = greedy;
  if (greedy && !tries.empty()) {
    fail(kOp, "token_rules has tries; expected none where it is greedy");
  }
  if (greedy && token_bitmask) {
    fail(kOp, "token_bitmask is given; expected None where it is greedy");
  }
  if (greedy) check_number(kOp, "num_candidates", 0, num_candidates, 1, 1);
  check_rank(kOp, "searches", searches, 2, "[n, 9]");
  p.count = searches.size(0);
  p.searches = reinterpret_cast<const SearchOfStep*>(arguments.contiguous<const int64_t>(
      "searches", searches, {p.count, kSearchNumbers}, "[n, 9]"));
  if (p.count > 0 && p.token_rules.rows == 0) {
    fail(kOp, "token_rules.bans has shape ", shape_text(rules[3]), "; expected a row at least");
  }
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
  const std::vector<PassOfStep> pass_list = passes_of_step(passes, p);
  p.passes = pass_list.data();
  p.num_passes = static_cast<int64_t>(pass_list.size());
  if constexpr (!kIsCuda) check_searches(p);
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
  const OnDevice device(first);
  SplitMemory count(nullptr);
  SearchStepParams counted = p;
  place_candidates(arguments, trace, &count, &counted);
  const size_t step_bytes =
      kIsCuda ? search_step_cuda_workspace_bytes(sizes) : search_step_workspace_bytes(sizes);
  constexpr size_t kAlignment = 64;
  const Tensor memory = new_tensor(
      first, {static_cast<int64_t>(count.used() + step_bytes + kAlignment)}, ScalarType::Byte);
  char* const aligned = static_cast<char*>(memory.mutable_data_ptr()) + kAlignment -
                        reinterpret_cast<uintptr_t>(memory.mutable_data_ptr()) % kAlignment;
  SplitMemory block(aligned);
  place_candidates(arguments, trace, &block, &p);
  Tensor tokens = new_tensor(first, {p.next_rows}, ScalarType::Long);
  Tensor parents = new_tensor(first, {p.next_rows}, ScalarType::Long);
  Tensor ended = new_tensor(first, {p.count}, ScalarType::Long);
  p.next_tokens = tokens.mutable_data_ptr<int64_t>();
  p.next_parents = parents.mutable_data_ptr<int64_t>();
  p.ended = ended.mutable_data_ptr<int64_t>();
  if constexpr (kIsCuda) {
    search_step_cuda(p, sizes, aligned + block.used(), device.stream());
  } else {
    Tensor rows;
    if (p.greedy) rows = copied_logits(logits, &p);
    search_step_cpu(p, sizes, aligned + block.used());
  }
  return {tokens, parents, ended};
}

}  // namespace
}  // namespace lmdecode::beam

LMD_OPS(m) { m.impl("beam_search_step_", TORCH_BOX(&lmdecode::beam::beam_search_step)); }
