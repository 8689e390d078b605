// beam_step on either device.
#include "beam/beam_step.h"

#include "beam/beam_rules.h"
#include "bindings/beam_search_checks.h"
#include "bindings/device.h"

namespace lmdecode::beam {
namespace {

constexpr const char* kOp = "beam_step";

void check_row_offsets(const BeamStepParams& p) {
  if (p.offsets.data == nullptr) return;
  if (p.offsets.at(0, 0) != 0 || p.offsets.at(p.requests, 0) != p.rows) {
    fail(kOp, "row_offsets takes the rows ", p.offsets.at(0, 0), " to ",
         p.offsets.at(p.requests, 0), "; expected 0 to ", p.rows);
  }
  for (int64_t r = 0; r < p.requests; ++r) {
    const int64_t slot = p.slots.data == nullptr ? r : p.slots.at(r, 0);
    const int64_t beams = p.parameters.num_beams[slot];
    if (p.offsets.at(r + 1, 0) - p.offsets.at(r, 0) != beams) {
      fail(kOp, "row_offsets gives request ", r, " the rows ", p.offsets.at(r, 0), " to ",
           p.offsets.at(r + 1, 0), "; expected as many as its num_beams, ", beams);
    }
  }
}

// Checks the content of the tensors, on the CPU only: CUDA kernels clamp it to its ranges itself.
void check_beam_step(const BeamStepParams& p) {
  check_slots(kOp, p.slots, p.requests, p.state.slots);
  const bool is_kept = !p.sequences.is_given;
  for (int64_t r = 0; r < p.requests; ++r) {
    const int64_t slot = p.slots.data == nullptr ? r : p.slots.at(r, 0);
    check_slot(kOp, p.state, p.parameters, slot, is_kept ? -1 : p.sequences.length);
    if (is_kept && p.state.done[slot] == 0 && p.state.lengths[slot] >= p.state.capacity) {
      fail(kOp, "state.lengths[", slot, "] is ", p.state.lengths[slot],
           "; expected less than the capacity of the state, ", p.state.capacity,
           ", where a search goes on");
    }
    if (p.parents.data != nullptr && p.parents.at(r, 0) < 0) {
      fail(kOp, "parent_offsets[", r, "] is ", p.parents.at(r, 0), "; expected a row");
    }
    const int64_t beams = p.parameters.num_beams[slot];
    for (int64_t i = 0; i < p.num_candidates; ++i) {
      const int64_t beam = p.beams.at(r, i);
      if (beam >= 0 && beam < beams) continue;
      if (BeamSearchSlot(p.state, p.parameters, slot, p.dialect).takes_part(p.scores.at(r, i))) {
        fail(kOp, "beams[", r, ", ", i, "] is ", beam, "; expected 0 to ", beams - 1,
             ", the beams of the request");
      }
    }
  }
  check_row_offsets(p);
}

// rows: below 0 where it is not known, which it is to CPU tensors.
void set_rows(BeamStepParams& p, const std::optional<Tensor>& row_offsets,
              const std::optional<Tensor>& parent_offsets, int64_t rows,
              const Arguments& arguments) {
  p.rows = p.requests * p.state.beams;
  if (row_offsets) {
    p.offsets = request_column<int64_t>(arguments, "row_offsets", *row_offsets, p.requests + 1);
    if (rows < 0 && kIsCuda) {
      fail(kOp, "rows was not given; expected what row_offsets ends in, which nothing waits for");
    }
    p.rows = rows < 0 ? p.offsets.at(p.requests, 0) : rows;
  } else if (rows >= 0 && rows != p.rows) {
    fail(kOp, "rows is ", rows, "; expected ", p.rows, ", the state's beams for each request");
  }
  if (!parent_offsets) return;
  check_rank(kOp, "parent_offsets", *parent_offsets, 1, "[requests] or more");
  p.parent_count = parent_offsets->size(0);
  if (p.parent_count < p.requests) {
    fail(kOp, "parent_offsets has shape ", shape_text(*parent_offsets), "; expected at least [",
         p.requests, "]");
  }
  p.parents = request_column<int64_t>(arguments, "parent_offsets", *parent_offsets, p.parent_count);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> beam_step(
    const std::vector<Tensor>& state, const std::vector<Tensor>& parameters, const Tensor& scores,
    const Tensor& tokens, const Tensor& beams, const std::optional<Tensor>& log_probs,
    const std::optional<Tensor>& status, const std::optional<Tensor>& slots,
    const std::optional<Tensor>& row_offsets, const std::optional<Tensor>& parent_offsets,
    const std::optional<Tensor>& sequences, const std::optional<Tensor>& stopped,
    const std::optional<Tensor>& bonus, int64_t rules, int64_t rows) {
  BeamStepParams p;
  const Arguments arguments = state_arguments(kOp, state);
  const Tensor& first = state[0];
  p.state = beam_search_state(arguments, state);
  p.parameters = beam_search_parameters(arguments, parameters, p.state.slots);
  p.dialect = beam_dialect(kOp, rules);
  check_rank(kOp, "scores", scores, 2, "[requests, candidates]");
  p.requests = scores.size(0);
  p.num_candidates = scores.size(1);
  if (p.num_candidates >= (int64_t{1} << 31)) {
    fail(kOp, "scores has shape ", shape_text(scores), "; expected fewer than 2^31 candidates");
  }
  const auto candidates = [&]<class T>(RequestRows<T>& to, const char* name, const Tensor& tensor) {
    to = request_rows<T>(arguments, name, tensor, p.requests, p.num_candidates);
  };
  candidates(p.scores, "scores", scores);
  candidates(p.tokens, "tokens", tokens);
  candidates(p.beams, "beams", beams);
  if (log_probs) candidates(p.log_probs, "log_probs", *log_probs);
  if (stopped) candidates(p.stopped, "stopped", *stopped);
  if (bonus) {
    p.bonus = request_rows<float>(arguments, "bonus", *bonus, p.requests, p.state.beams);
  }
  if (status) {
    p.status = request_column<uint8_t>(arguments, "status", *status, p.requests);
  }
  if (slots) {
    p.slots = request_column<int64_t>(arguments, "slots", *slots, p.requests);
  } else if (p.requests > p.state.slots) {
    fail(kOp, "scores has shape ", shape_text(scores), "; expected at most ", p.state.slots,
         " requests, the slots of the state");
  }
  if (sequences) {
    p.sequences = caller_sequences(arguments, *sequences, p.requests, p.state,
                                   p.dialect != BeamDialect::kScorer);
  }
  set_rows(p, row_offsets, parent_offsets, rows, arguments);
  if constexpr (!kIsCuda) check_beam_step(p);
  const OnDevice device(first);
  Tensor next_scores = new_tensor(first, {p.rows}, ScalarType::Float);
  Tensor next_tokens = new_tensor(first, {p.rows}, ScalarType::Long);
  Tensor next_parents = new_tensor(first, {p.rows}, ScalarType::Long);
  Tensor decisions = new_tensor(first, {p.requests, p.num_candidates}, ScalarType::Int);
  p.next_scores = static_cast<float*>(next_scores.mutable_data_ptr());
  p.next_tokens = static_cast<int64_t*>(next_tokens.mutable_data_ptr());
  p.next_parents = static_cast<int64_t*>(next_parents.mutable_data_ptr());
  p.decisions = static_cast<int32_t*>(decisions.mutable_data_ptr());
  if (p.requests > 0) {
    if constexpr (kIsCuda) {
      beam_step_cuda(p, device.stream());
    } else {
      beam_step_cpu(p);
    }
  }
  return {next_scores, next_tokens, next_parents, decisions};
}

}  // namespace
}  // namespace lmdecode::beam

LMD_OPS(m) { m.impl("beam_step", TORCH_BOX(&lmdecode::beam::beam_step)); }
