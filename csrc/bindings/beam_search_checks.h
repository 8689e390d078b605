// The state, the parameters and other arguments that beam_step, beam_finalize and decoding_steps_
// share, to kernel parameters: for the CPU and the CUDA library.
#pragma once

#include <vector>

#include "beam/beam_rules.h"
#include "bindings/tensor_checks.h"

namespace lmdecode::beam {

// Reads the tensors of a call on a state: all on its device.
inline Arguments state_arguments(const char* op, const std::vector<Tensor>& state) {
  constexpr size_t kFields = 14;
  if (state.size() != kFields) {
    fail(op, "state has ", state.size(), " tensors; expected the ", kFields, " of a BeamState");
  }
  return {op, "state.sequences", state[0]};
}

inline BeamSearchState beam_search_state(const Arguments& arguments,
                                         const std::vector<Tensor>& state) {
  const char* const op = arguments.op();
  BeamSearchState s;
  const Tensor& sequences = state[0];
  check_rank(op, "state.sequences", sequences, 3, "[slots, beams, capacity]");
  check_rank(op, "state.hypothesis_sequences", state[5], 3, "[slots, hypotheses, capacity]");
  check_rank(op, "state.log_probs", state[1], 3, "[slots, beams, capacity or 0]");
  check_rank(op, "state.beam_indices", state[2], 3, "[slots, beams, capacity or 0]");
  s.slots = sequences.size(0);
  s.beams = sequences.size(1);
  s.capacity = sequences.size(2);
  s.hypotheses = state[5].size(1);
  s.log_prob_capacity = state[1].size(2) == 0 ? 0 : s.capacity;
  s.beam_index_capacity = state[2].size(2) == 0 ? 0 : s.capacity;
  constexpr int64_t kMaxPlaces = int64_t{1} << 28;
  if (s.beams < 1 || s.beams >= kMaxPlaces) {
    fail(op, "state.sequences has shape ", shape_text(sequences), "; expected 1 to 2^28 - 1 beams");
  }
  if (s.hypotheses < 1 || s.hypotheses >= kMaxPlaces) {
    fail(op, "state.hypothesis_sequences has shape ", shape_text(state[5]),
         "; expected 1 to 2^28 - 1 hypotheses");
  }
  size_t index = 0;
  const auto next = [&]<class T>(T*& pointer, const char* name, Arguments::Sizes sizes,
                                 const char* shape) {
    pointer = arguments.contiguous<T>({"state.", name}, state[index++], sizes, shape);
  };
  const char* const hypotheses = "[slots, hypotheses]";
  next(s.sequences, "sequences", {s.slots, s.beams, s.capacity}, "[slots, beams, capacity]");
  next(s.log_probs, "log_probs", {s.slots, s.beams, s.log_prob_capacity},
       "[slots, beams, capacity or 0]");
  next(s.beam_indices, "beam_indices", {s.slots, s.beams, s.beam_index_capacity},
       "[slots, beams, capacity or 0]");
  next(s.scores, "scores", {s.slots, s.beams}, "[slots, beams]");
  next(s.lengths, "lengths", {s.slots}, "[slots]");
  next(s.hypothesis_sequences, "hypothesis_sequences", {s.slots, s.hypotheses, s.capacity},
       "[slots, hypotheses, capacity]");
  next(s.hypothesis_log_probs, "hypothesis_log_probs", {s.slots, s.hypotheses, s.log_prob_capacity},
       "[slots, hypotheses, that of log_probs]");
  next(s.hypothesis_beam_indices, "hypothesis_beam_indices",
       {s.slots, s.hypotheses, s.beam_index_capacity}, "[slots, hypotheses, that of beam_indices]");
  next(s.hypothesis_lengths, "hypothesis_lengths", {s.slots, s.hypotheses}, hypotheses);
  next(s.hypothesis_scores, "hypothesis_scores", {s.slots, s.hypotheses}, hypotheses);
  next(s.hypothesis_numbers, "hypothesis_numbers", {s.slots, s.hypotheses}, hypotheses);
  next(s.worst_scores, "worst_scores", {s.slots}, "[slots]");
  next(s.done, "done", {s.slots}, "[slots]");
  next(s.status, "status", {s.slots}, "[slots]");
  return s;
}

inline BeamSearchParameters beam_search_parameters(const Arguments& arguments,
                                                   const std::vector<Tensor>& parameters,
                                                   int64_t slots) {
  const char* const op = arguments.op();
  constexpr size_t kFields = 8, kEndTokens = 6;
  if (parameters.size() != kFields) {
    fail(op, "parameters has ", parameters.size(), " tensors; expected the ", kFields,
         " of a BeamParameters");
  }
  BeamSearchParameters p;
  check_rank(op, "parameters.end_tokens", parameters[kEndTokens], 2, "[slots, end tokens]");
  p.num_end_tokens = parameters[kEndTokens].size(1);
  size_t index = 0;
  const auto next = [&]<class T>(const T*& pointer, const char* name) {
    pointer = arguments.contiguous<const T>({"parameters.", name}, parameters[index++], {slots},
                                            "[slots] of the state");
  };
  next(p.num_beams, "num_beams");
  next(p.num_hypotheses, "num_hypotheses");
  next(p.prompt_lengths, "prompt_lengths");
  next(p.max_lengths, "max_lengths");
  next(p.length_penalty, "length_penalty");
  next(p.early_stopping, "early_stopping");
  p.end_tokens = arguments.contiguous<const int64_t>({"parameters.", "end_tokens"},
                                                     parameters[index++], {slots, p.num_end_tokens},
                                                     "[slots of the state, end tokens]");
  next(p.pad_tokens, "pad_tokens");
  return p;
}

inline BeamDialect beam_dialect(const char* op, int64_t dialect) {
  if (dialect < 0 || dialect > static_cast<int64_t>(BeamDialect::kFairseq)) {
    fail(op, "rules is ", dialect, "; expected 0 (generate), 1 (scorer) or 2 (fairseq)");
  }
  return static_cast<BeamDialect>(dialect);
}

// [requests, columns], any strides.
template <class T>
RequestRows<T> request_rows(const Arguments& arguments, const char* name, const Tensor& tensor,
                            int64_t requests, int64_t columns) {
  const T* const data = arguments.strided<const T>(name, tensor, {requests, columns});
  return {data, tensor.stride(0), tensor.stride(1)};
}

// [requests], any stride; one column.
template <class T>
RequestRows<T> request_column(const Arguments& arguments, const char* name, const Tensor& tensor,
                              int64_t requests) {
  const T* const data = arguments.strided<const T>(name, tensor, {requests});
  return {data, tensor.stride(0), 0};
}

// entries: requests, or the groups of them.
inline CallerSequences caller_sequences(const Arguments& arguments, const Tensor& tensor,
                                        int64_t entries, const BeamSearchState& state,
                                        bool adds_token) {
  const char* const op = arguments.op();
  check_dtype(op, "sequences", tensor, ScalarType::Long);
  check_rank(op, "sequences", tensor, 3, "[requests, beams, length]");
  arguments.check_device("sequences", tensor);
  if (tensor.size(0) != entries || tensor.size(1) != state.beams) {
    fail(op, "sequences has shape ", shape_text(tensor), "; expected [", entries, ", ", state.beams,
         ", length]");
  }
  if (tensor.size(2) + adds_token > state.capacity) {
    fail(op, "sequences has shape ", shape_text(tensor), "; expected a length of at most ",
         state.capacity - adds_token, ", since the state has a capacity of ", state.capacity);
  }
  return {true,
          static_cast<const int64_t*>(tensor.const_data_ptr()),
          tensor.size(2),
          tensor.stride(0),
          tensor.stride(1),
          tensor.stride(2)};
}

// Checks that each slot occurs once.
inline void check_slots(const char* op, const RequestRows<int64_t>& slots, int64_t entries,
                        int64_t num_slots) {
  if (slots.data == nullptr) return;
  std::vector<uint8_t> seen(static_cast<size_t>(num_slots));
  for (int64_t entry = 0; entry < entries; ++entry) {
    const int64_t slot = slots.at(entry, 0);
    if (slot < 0 || slot >= num_slots) {
      fail(op, "slots[", entry, "] is ", slot, "; expected 0 to ", num_slots - 1);
    }
    if (seen[static_cast<size_t>(slot)]++ != 0) {
      fail(op, "slots[", entry, "] is ", slot, " once more; expected each slot once");
    }
  }
}

inline void check_range(const char* op, const char* name, int64_t slot, int64_t value, int64_t low,
                        int64_t high, const char* why) {
  if (value >= low && value <= high) return;
  fail(op, name, "[", slot, "] is ", value, "; expected ", low, " to ", high, why);
}

// Checks one slot of a call. sequence_length: of the caller's sequences, or below 0.
inline void check_slot(const char* op, const BeamSearchState& state, const BeamSearchParameters& p,
                       int64_t slot, int64_t sequence_length) {
  check_range(op, "parameters.num_beams", slot, p.num_beams[slot], 1, state.beams,
              ", the beams of the state");
  check_range(op, "parameters.num_hypotheses", slot, p.num_hypotheses[slot], 1, state.hypotheses,
              ", the hypotheses of the state");
  check_range(op, "parameters.early_stopping", slot, p.early_stopping[slot], 0, 2,
              ": False, True or \"never\"");
  if (p.max_lengths[slot] < 0) {
    fail(op, "parameters.max_lengths[", slot, "] is ", p.max_lengths[slot],
         "; expected a length, or 0 for none");
  }
  int64_t length = sequence_length;
  if (length < 0) {
    length = state.lengths[slot];
    check_range(op, "state.lengths", slot, length, 0, state.capacity,
                ", the capacity of the state");
  }
  check_range(op, "parameters.prompt_lengths", slot, p.prompt_lengths[slot], 0, length,
              ", the length of the running sequences");
}

}  // namespace lmdecode::beam
