// beam_finalize on either device.
#include "beam/beam_finalize.h"

#include "bindings/beam_search_checks.h"
#include "bindings/device.h"

namespace lmdecode::beam {
namespace {

constexpr const char* kOp = "beam_finalize";

// As check_beam_step (beam_step.cpp).
void check_beam_finalize(const BeamFinalizeParams& p) {
  const int64_t entries = p.requests * p.num_groups;
  check_slots(kOp, p.slots, entries, p.state.slots);
  for (int64_t entry = 0; entry < entries; ++entry) {
    const int64_t slot = p.slots.data == nullptr ? entry : p.slots.at(entry, 0);
    const bool is_kept = !p.sequences.is_given;
    check_slot(kOp, p.state, p.parameters, slot, is_kept ? -1 : p.sequences.length);
    for (int64_t place = 0; place < p.parameters.num_hypotheses[slot]; ++place) {
      const int64_t at = slot * p.state.hypotheses + place;
      const int64_t length = p.state.hypothesis_lengths[at];
      if (p.state.hypothesis_numbers[at] >= 0 && (length < 0 || length > p.state.capacity)) {
        fail(kOp, "state.hypothesis_lengths[", slot, ", ", place, "] is ", length,
             "; expected 0 to ", p.state.capacity, ", the capacity of the state");
      }
    }
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> beam_finalize(
    const std::vector<Tensor>& state, const std::vector<Tensor>& parameters,
    int64_t num_return_sequences, int64_t num_groups, const std::optional<Tensor>& slots,
    const std::optional<Tensor>& sequences, const std::optional<Tensor>& scores, bool add_open,
    int64_t rules) {
  BeamFinalizeParams p;
  const Arguments arguments = state_arguments(kOp, state);
  const Tensor& first = state[0];
  p.state = beam_search_state(arguments, state);
  p.parameters = beam_search_parameters(arguments, parameters, p.state.slots);
  p.dialect = beam_dialect(kOp, rules);
  p.add_open = add_open;
  if (num_return_sequences < 1 || num_return_sequences >= (int64_t{1} << 31)) {
    fail(kOp, "num_return_sequences is ", num_return_sequences, "; expected 1 to 2^31 - 1");
  }
  p.num_return_sequences = num_return_sequences;
  const int64_t entries = slots ? slots->dim() == 1 ? slots->size(0) : 0 : p.state.slots;
  if (slots) {
    check_rank(kOp, "slots", *slots, 1, "[requests * num_groups]");
    p.slots = request_column<int64_t>(arguments, "slots", *slots, entries);
  }
  if (num_groups < 1 || entries % num_groups != 0) {
    fail(kOp, "num_groups is ", num_groups, "; expected a divisor of ", entries, ", the slots");
  }
  if (num_groups * p.state.hypotheses >= (int64_t{1} << 31)) {
    fail(kOp, "num_groups is ", num_groups, "; expected fewer than 2^31 hypotheses a request");
  }
  p.num_groups = num_groups;
  p.requests = entries / num_groups;
  if (sequences) p.sequences = caller_sequences(arguments, *sequences, entries, p.state, false);
  if (scores) {
    p.scores = request_rows<float>(arguments, "scores", *scores, entries, p.state.beams);
  }
  if constexpr (!kIsCuda) check_beam_finalize(p);
  const OnDevice device(first);
  const int64_t n = num_return_sequences;
  Tensor best = new_tensor(first, {p.requests, n, p.state.capacity}, ScalarType::Long);
  Tensor lengths = new_tensor(first, {p.requests, n}, ScalarType::Long);
  Tensor best_scores = new_tensor(first, {p.requests, n}, ScalarType::Double);
  Tensor log_probs =
      new_tensor(first, {p.requests, n, p.state.log_prob_capacity}, ScalarType::Float);
  Tensor beam_indices =
      new_tensor(first, {p.requests, n, p.state.beam_index_capacity}, ScalarType::Int);
  Tensor places = new_tensor(first, {p.requests, n}, ScalarType::Long);
  p.best_sequences = static_cast<int64_t*>(best.mutable_data_ptr());
  p.best_lengths = static_cast<int64_t*>(lengths.mutable_data_ptr());
  p.best_scores = static_cast<double*>(best_scores.mutable_data_ptr());
  p.best_log_probs = static_cast<float*>(log_probs.mutable_data_ptr());
  p.best_beam_indices = static_cast<int32_t*>(beam_indices.mutable_data_ptr());
  p.best_places = static_cast<int64_t*>(places.mutable_data_ptr());
  if (p.requests > 0) {
    if constexpr (kIsCuda) {
      beam_finalize_cuda(p, device.stream());
    } else {
      beam_finalize_cpu(p);
    }
  }
  return {best, lengths, best_scores, log_probs, beam_indices, places};
}

}  // namespace
}  // namespace lmdecode::beam

LMD_OPS(m) { m.impl("beam_finalize", TORCH_BOX(&lmdecode::beam::beam_finalize)); }
