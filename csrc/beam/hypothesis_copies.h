// Running sequences to the places of hypotheses, by columns: on the CPU all of them, in CUDA those
// of one thread.
#pragma once

#include "beam/beam_search_state.h"

namespace lmdecode::beam {

// Columns first, first + step, ... of every row.
struct Columns {
  int64_t first = 0;
  int64_t step = 1;
};

struct NewHypothesis {
  int64_t slot;
  int64_t place;
  int64_t beam;    // the running beam that it was
  int64_t length;  // of the running sequences
  // The end token after them; absent where an open beam becomes a hypothesis.
  bool has_end;
  bool keeps_end_token;  // in the sequence, too
  int64_t end_token;
  float end_log_prob;
};

namespace hypothesis_detail {

// `length` elements of a running row, one of its end, then nothing.
template <class T>
LMD_HOST_DEVICE void copy_part(T* hypotheses, const T* running, int64_t capacity,
                               const BeamSearchState& state, const NewHypothesis& h, T end,
                               T nothing, Columns columns) {
  T* const to = hypotheses + (h.slot * state.hypotheses + h.place) * capacity;
  const T* const from = running + (h.slot * state.beams + h.beam) * capacity;
  int64_t column = columns.first;
  for (; column < h.length && column < capacity; column += columns.step) to[column] = from[column];
  for (; column < capacity; column += columns.step) {
    to[column] = column == h.length && h.has_end ? end : nothing;
  }
}

}  // namespace hypothesis_detail

// request: owns the sequences where the caller keeps them.
LMD_HOST_DEVICE void copy_hypothesis(const BeamSearchState& state, const CallerSequences& sequences,
                                     int64_t request, const NewHypothesis& h, Columns columns) {
  using hypothesis_detail::copy_part;
  int64_t* const to =
      state.hypothesis_sequences + (h.slot * state.hypotheses + h.place) * state.capacity;
  const int64_t* from = state.sequences + (h.slot * state.beams + h.beam) * state.capacity;
  int64_t stride = 1;
  if (sequences.is_given) {
    from = sequences.data + request * sequences.request_stride + h.beam * sequences.beam_stride;
    stride = sequences.stride;
  }
  int64_t column = columns.first;
  for (; column < h.length; column += columns.step) to[column] = from[column * stride];
  if (column == h.length && h.keeps_end_token) to[column] = h.end_token;
  copy_part(state.hypothesis_log_probs, state.log_probs, state.log_prob_capacity, state, h,
            h.end_log_prob, 0.0f, columns);
  copy_part(state.hypothesis_beam_indices, state.beam_indices, state.beam_index_capacity, state, h,
            static_cast<int32_t>(h.beam), -1, columns);
}

}  // namespace lmdecode::beam
