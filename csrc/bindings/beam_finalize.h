// Arguments of beam_finalize to kernel parameters: shared by the CPU and the CUDA library.
#pragma once

#include "beam/beam_finalize.h"
#include "bindings/beam_search_checks.h"

namespace lmdecode::beam {

constexpr const char* kBeamFinalizeOp = "beam_finalize";

// As BeamStepOp (beam_step.h).
template <class Device>
struct BeamFinalizeOp {
  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> call(
      const std::vector<Tensor>& state, const std::vector<Tensor>& parameters,
      int64_t num_return_sequences, int64_t num_groups, const std::optional<Tensor>& slots,
      const std::optional<Tensor>& sequences, const std::optional<Tensor>& scores, bool add_open,
      int64_t rules) {
    const char* const op = kBeamFinalizeOp;
    BeamFinalizeParams p;
    const Tensor& first = state_sequences(op, state);
    const LikeTensor like(first);
    p.state = beam_search_state(op, state, like);
    p.parameters = beam_search_parameters(op, parameters, p.state.slots, like);
    p.rules = beam_rules(op, rules);
    p.add_open = add_open;
    if (num_return_sequences < 1 || num_return_sequences >= (int64_t{1} << 31)) {
      fail(op, "num_return_sequences is ", num_return_sequences, "; expected 1 to 2^31 - 1");
    }
    p.num_return_sequences = num_return_sequences;
    const int64_t entries = slots ? slots->dim() == 1 ? slots->size(0) : 0 : p.state.slots;
    if (slots) {
      check_rank(op, "slots", *slots, 1, "[requests * num_groups]");
      p.slots = request_column<int64_t>(op, "slots", *slots, ScalarType::Long, entries, like);
    }
    if (num_groups < 1 || entries % num_groups != 0) {
      fail(op, "num_groups is ", num_groups, "; expected a divisor of ", entries, ", the slots");
    }
    if (num_groups * p.state.hypotheses >= (int64_t{1} << 31)) {
      fail(op, "num_groups is ", num_groups, "; expected fewer than 2^31 hypotheses a request");
    }
    p.num_groups = num_groups;
    p.requests = entries / num_groups;
    if (sequences) p.sequences = caller_sequences(op, *sequences, entries, p.state, false, like);
    if (scores) {
      p.scores = request_rows<float>(op, "scores", *scores, ScalarType::Float, entries,
                                     p.state.beams, like);
    }
    Device::check(p);
    const typename Device::Guard guard(first);
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
    if (p.requests > 0) Device::run(p, first);
    return {best, lengths, best_scores, log_probs, beam_indices, places};
  }
};

}  // namespace lmdecode::beam
