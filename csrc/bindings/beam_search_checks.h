// The state, the parameters and other arguments that beam_step, beam_finalize and decoding_steps_
// share, to kernel parameters: for the CPU and the CUDA library.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "beam/beam_rules.h"
#include "bindings/tensor_checks.h"

namespace lmdecode::beam {

// A tensor argument by what an error says of it, such as `state.scores`.
struct FieldName {
  const char* of;
  const char* field;

  std::string text() const { return std::string(of) + field; }
};

using lmdecode::sizes_text;

// A tensor whose device all others are to have; asked for it once, since each question to torch
// takes a few nanoseconds of every step.
struct LikeTensor {
  const Tensor& tensor;
  int32_t type = 0, index = 0;

  explicit LikeTensor(const Tensor& like) : tensor(like) { ask(like, &type, &index); }

  bool is_here(const Tensor& other) const {
    int32_t other_type = 0, other_index = 0;
    ask(other, &other_type, &other_index);
    return other_type == type && other_index == index;
  }

 private:
  static void ask(const Tensor& tensor, int32_t* type, int32_t* index) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), type));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), index));
  }
};

// The pointer of a contiguous tensor of this dtype and shape on the device of `like`.
template <class T>
T* field(const char* op, FieldName name, const Tensor& tensor, ScalarType type,
         std::initializer_list<int64_t> sizes, const char* shape, const LikeTensor& like) {
  if (dtype_of(tensor) != type) check_dtype(op, name.text().c_str(), tensor, type);
  const auto given = tensor.sizes();
  if (given.size() != sizes.size() || !std::equal(sizes.begin(), sizes.end(), given.begin())) {
    fail(op, name.text(), " has shape ", shape_text(tensor), "; expected ", shape, ", here ",
         sizes_text(sizes));
  }
  if (!tensor.is_contiguous()) {
    fail(op, name.text(), " has strides; expected a contiguous tensor");
  }
  if (!like.is_here(tensor)) {
    check_same_device(op, name.text().c_str(), tensor, "state.sequences", like.tensor);
  }
  if constexpr (std::is_const_v<T>) {
    return static_cast<T*>(tensor.const_data_ptr());
  } else {
    return static_cast<T*>(tensor.mutable_data_ptr());
  }
}

// The sequences, once it is clear that there are some.
inline const Tensor& state_sequences(const char* op, const std::vector<Tensor>& state) {
  constexpr size_t kFields = 14;
  if (state.size() != kFields) {
    fail(op, "state has ", state.size(), " tensors; expected the ", kFields, " of a BeamState");
  }
  return state[0];
}

inline BeamSearchState beam_search_state(const char* op, const std::vector<Tensor>& state,
                                         const LikeTensor& like) {
  BeamSearchState s;
  const Tensor& sequences = like.tensor;
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
  const auto next = [&]<class T>(T*& pointer, const char* name, ScalarType type,
                                 std::initializer_list<int64_t> sizes, const char* shape) {
    pointer = field<T>(op, {"state.", name}, state[index++], type, sizes, shape, like);
  };
  const char* const hypotheses = "[slots, hypotheses]";
  next(s.sequences, "sequences", ScalarType::Long, {s.slots, s.beams, s.capacity},
       "[slots, beams, capacity]");
  next(s.log_probs, "log_probs", ScalarType::Float, {s.slots, s.beams, s.log_prob_capacity},
       "[slots, beams, capacity or 0]");
  next(s.beam_indices, "beam_indices", ScalarType::Int, {s.slots, s.beams, s.beam_index_capacity},
       "[slots, beams, capacity or 0]");
  next(s.scores, "scores", ScalarType::Float, {s.slots, s.beams}, "[slots, beams]");
  next(s.lengths, "lengths", ScalarType::Long, {s.slots}, "[slots]");
  next(s.hypothesis_sequences, "hypothesis_sequences", ScalarType::Long,
       {s.slots, s.hypotheses, s.capacity}, "[slots, hypotheses, capacity]");
  next(s.hypothesis_log_probs, "hypothesis_log_probs", ScalarType::Float,
       {s.slots, s.hypotheses, s.log_prob_capacity}, "[slots, hypotheses, that of log_probs]");
  next(s.hypothesis_beam_indices, "hypothesis_beam_indices", ScalarType::Int,
       {s.slots, s.hypotheses, s.beam_index_capacity}, "[slots, hypotheses, that of beam_indices]");
  next(s.hypothesis_lengths, "hypothesis_lengths", ScalarType::Long, {s.slots, s.hypotheses},
       hypotheses);
  next(s.hypothesis_scores, "hypothesis_scores", ScalarType::Double, {s.slots, s.hypotheses},
       hypotheses);
  next(s.hypothesis_numbers, "hypothesis_numbers", ScalarType::Long, {s.slots, s.hypotheses},
       hypotheses);
  next(s.worst_scores, "worst_scores", ScalarType::Double, {s.slots}, "[slots]");
  next(s.done, "done", ScalarType::Byte, {s.slots}, "[slots]");
  next(s.status, "status", ScalarType::Byte, {s.slots}, "[slots]");
  return s;
}

inline BeamSearchParameters beam_search_parameters(const char* op,
                                                   const std::vector<Tensor>& parameters,
                                                   int64_t slots, const LikeTensor& like) {
  constexpr size_t kFields = 8, kEndTokens = 6;
  if (parameters.size() != kFields) {
    fail(op, "parameters has ", parameters.size(), " tensors; expected the ", kFields,
         " of a BeamParameters");
  }
  BeamSearchParameters p;
  check_rank(op, "parameters.end_tokens", parameters[kEndTokens], 2, "[slots, end tokens]");
  p.num_end_tokens = parameters[kEndTokens].size(1);
  size_t index = 0;
  const auto next = [&]<class T>(const T*& pointer, const char* name, ScalarType type) {
    pointer = field<const T>(op, {"parameters.", name}, parameters[index++], type, {slots},
                             "[slots] of the state", like);
  };
  next(p.num_beams, "num_beams", ScalarType::Long);
  next(p.num_hypotheses, "num_hypotheses", ScalarType::Long);
  next(p.prompt_lengths, "prompt_lengths", ScalarType::Long);
  next(p.max_lengths, "max_lengths", ScalarType::Long);
  next(p.length_penalty, "length_penalty", ScalarType::Double);
  next(p.early_stopping, "early_stopping", ScalarType::Long);
  p.end_tokens =
      field<const int64_t>(op, {"parameters.", "end_tokens"}, parameters[index++], ScalarType::Long,
                           {slots, p.num_end_tokens}, "[slots of the state, end tokens]", like);
  next(p.pad_tokens, "pad_tokens", ScalarType::Long);
  return p;
}

inline BeamRules beam_rules(const char* op, int64_t rules) {
  if (rules < 0 || rules > static_cast<int64_t>(BeamRules::kFairseq)) {
    fail(op, "rules is ", rules, "; expected 0 (generate), 1 (scorer) or 2 (fairseq)");
  }
  return static_cast<BeamRules>(rules);
}

// [requests, columns], any strides.
template <class T>
RequestRows<T> request_rows(const char* op, const char* name, const Tensor& tensor, ScalarType type,
                            int64_t requests, int64_t columns, const LikeTensor& like) {
  check_dtype(op, name, tensor, type);
  check_shape(op, name, tensor, requests, columns);
  if (!like.is_here(tensor)) {
    check_same_device(op, name, tensor, "state.sequences", like.tensor);
  }
  return {static_cast<const T*>(tensor.const_data_ptr()), tensor.stride(0), tensor.stride(1)};
}

// [requests], any stride; one column.
template <class T>
RequestRows<T> request_column(const char* op, const char* name, const Tensor& tensor,
                              ScalarType type, int64_t requests, const LikeTensor& like) {
  check_dtype(op, name, tensor, type);
  check_shape(op, name, tensor, requests);
  if (!like.is_here(tensor)) {
    check_same_device(op, name, tensor, "state.sequences", like.tensor);
  }
  return {static_cast<const T*>(tensor.const_data_ptr()), tensor.stride(0), 0};
}

// entries: requests, or the groups of them.
inline CallerSequences caller_sequences(const char* op, const Tensor& tensor, int64_t entries,
                                        const BeamSearchState& state, bool adds_token,
                                        const LikeTensor& like) {
  check_dtype(op, "sequences", tensor, ScalarType::Long);
  check_rank(op, "sequences", tensor, 3, "[requests, beams, length]");
  if (!like.is_here(tensor)) {
    check_same_device(op, "sequences", tensor, "state.sequences", like.tensor);
  }
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

}  // namespace lmdecode::beam
