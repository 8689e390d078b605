// Arguments of beam_step and beam_finalize to kernel parameters: shared by the CPU and the CUDA
// library.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "beam/beam_finalize.h"
#include "beam/beam_step.h"
#include "bindings/tensor_checks.h"

namespace lmdecode::beam {

constexpr const char* kBeamStepOp = "beam_step";
constexpr const char* kBeamFinalizeOp = "beam_finalize";

// A tensor argument by what an error says of it, such as `state.scores`.
struct FieldName {
  const char* of;
  const char* field;

  std::string text() const { return std::string(of) + field; }
};

inline std::string sizes_text(std::initializer_list<int64_t> sizes) {
  std::string text = "[";
  for (const int64_t size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

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
  if (tensor.scalar_type() != type) check_dtype(op, name.text().c_str(), tensor, type);
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
