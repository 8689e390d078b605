// Arguments of beam_step to kernel parameters: shared by the CPU and the CUDA library.
#pragma once

#include "beam/beam_step.h"
#include "bindings/beam_search_checks.h"

namespace lmdecode::beam {

constexpr const char* kBeamStepOp = "beam_step";

// The op on one device: Device::check looks at what the tensors hold, before anything is written,
// where that can be done, Device::Guard selects the device, Device::run launches.
template <class Device>
struct BeamStepOp {
  static std::tuple<Tensor, Tensor, Tensor, Tensor> call(
      const std::vector<Tensor>& state, const std::vector<Tensor>& parameters, const Tensor& scores,
      const Tensor& tokens, const Tensor& beams, const std::optional<Tensor>& log_probs,
      const std::optional<Tensor>& status, const std::optional<Tensor>& slots,
      const std::optional<Tensor>& row_offsets, const std::optional<Tensor>& parent_offsets,
      const std::optional<Tensor>& sequences, const std::optional<Tensor>& stopped,
      const std::optional<Tensor>& bonus, int64_t rules, int64_t rows) {
    const char* const op = kBeamStepOp;
    BeamStepParams p;
    const Tensor& first = state_sequences(op, state);
    const LikeTensor like(first);
    p.state = beam_search_state(op, state, like);
    p.parameters = beam_search_parameters(op, parameters, p.state.slots, like);
    p.rules = beam_rules(op, rules);
    check_rank(op, "scores", scores, 2, "[requests, candidates]");
    p.requests = scores.size(0);
    p.num_candidates = scores.size(1);
    if (p.num_candidates >= (int64_t{1} << 31)) {
      fail(op, "scores has shape ", shape_text(scores), "; expected fewer than 2^31 candidates");
    }
    const auto candidates = [&]<class T>(RequestRows<T>& to, const char* name, const Tensor& tensor,
                                         ScalarType type) {
      to = request_rows<T>(op, name, tensor, type, p.requests, p.num_candidates, like);
    };
    candidates(p.scores, "scores", scores, ScalarType::Float);
    candidates(p.tokens, "tokens", tokens, ScalarType::Long);
    candidates(p.beams, "beams", beams, ScalarType::Long);
    if (log_probs) candidates(p.log_probs, "log_probs", *log_probs, ScalarType::Float);
    if (stopped) candidates(p.stopped, "stopped", *stopped, ScalarType::Bool);
    if (bonus) {
      p.bonus = request_rows<float>(op, "bonus", *bonus, ScalarType::Float, p.requests,
                                    p.state.beams, like);
    }
    if (status) {
      p.status = request_column<uint8_t>(op, "status", *status, ScalarType::Byte, p.requests, like);
    }
    if (slots) {
      p.slots = request_column<int64_t>(op, "slots", *slots, ScalarType::Long, p.requests, like);
    } else if (p.requests > p.state.slots) {
      fail(op, "scores has shape ", shape_text(scores), "; expected at most ", p.state.slots,
           " requests, the slots of the state");
    }
    if (sequences) {
      p.sequences = caller_sequences(op, *sequences, p.requests, p.state,
                                     p.rules != BeamRules::kScorer, like);
    }
    set_rows(p, row_offsets, parent_offsets, rows, like);
    Device::check(p);
    const typename Device::Guard guard(first);
    Tensor next_scores = new_tensor(first, {p.rows}, ScalarType::Float);
    Tensor next_tokens = new_tensor(first, {p.rows}, ScalarType::Long);
    Tensor next_parents = new_tensor(first, {p.rows}, ScalarType::Long);
    Tensor decisions = new_tensor(first, {p.requests, p.num_candidates}, ScalarType::Int);
    p.next_scores = static_cast<float*>(next_scores.mutable_data_ptr());
    p.next_tokens = static_cast<int64_t*>(next_tokens.mutable_data_ptr());
    p.next_parents = static_cast<int64_t*>(next_parents.mutable_data_ptr());
    p.decisions = static_cast<int32_t*>(decisions.mutable_data_ptr());
    if (p.requests > 0) Device::run(p, first);
    return {next_scores, next_tokens, next_parents, decisions};
  }

 private:
  // rows: below 0 where it is not known, which it is to CPU tensors.
  static void set_rows(BeamStepParams& p, const std::optional<Tensor>& row_offsets,
                       const std::optional<Tensor>& parent_offsets, int64_t rows,
                       const LikeTensor& like) {
    const char* const op = kBeamStepOp;
    p.rows = p.requests * p.state.beams;
    if (row_offsets) {
      p.offsets = request_column<int64_t>(op, "row_offsets", *row_offsets, ScalarType::Long,
                                          p.requests + 1, like);
      if (rows < 0 && !like.tensor.is_cpu()) {
        fail(op, "rows was not given; expected what row_offsets ends in, which nothing waits for");
      }
      p.rows = rows < 0 ? p.offsets.at(p.requests, 0) : rows;
    } else if (rows >= 0 && rows != p.rows) {
      fail(op, "rows is ", rows, "; expected ", p.rows, ", the state's beams for each request");
    }
    if (!parent_offsets) return;
    check_rank(op, "parent_offsets", *parent_offsets, 1, "[requests] or more");
    p.parent_count = parent_offsets->size(0);
    if (p.parent_count < p.requests) {
      fail(op, "parent_offsets has shape ", shape_text(*parent_offsets), "; expected at least [",
           p.requests, "]");
    }
    p.parents = request_column<int64_t>(op, "parent_offsets", *parent_offsets, ScalarType::Long,
                                        p.parent_count, like);
  }
};

}  // namespace lmdecode::beam
