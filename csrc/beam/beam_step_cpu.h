// beam_step on the CPU: a request at a time, its sequences moved in place.
#pragma once

#include <cstddef>

#include "beam/beam_step.h"
#include "beam/beam_step_plan.h"
#include "common/copy_rows.h"

namespace lmdecode::beam {

// Scratch of a thread, concatenated; the widest elements first.
struct BeamStepScratch {
  unsigned char* row;  // [capacity] of the widest element
  RowCopy* copies;     // [max_row_copies(beams)]
  BeamStepPlan plan;
  int32_t* readers;  // [beams]

  static size_t bytes(const BeamSearchState& state) {
    return static_cast<size_t>(state.capacity) * sizeof(int64_t) +
           static_cast<size_t>(max_row_copies(state.beams)) * sizeof(RowCopy) +
           static_cast<size_t>(3 * state.beams + state.hypotheses) * sizeof(int32_t);
  }

  BeamStepScratch(const BeamSearchState& state, void* memory)
      : row(static_cast<unsigned char*>(memory)),
        copies(reinterpret_cast<RowCopy*>(row + state.capacity * sizeof(int64_t))),
        plan{},
        readers(reinterpret_cast<int32_t*>(copies + max_row_copies(state.beams))) {
    plan.parents = readers + state.beams;
    plan.log_probs = reinterpret_cast<float*>(plan.parents + state.beams);
    plan.sources = reinterpret_cast<int32_t*>(plan.log_probs + state.beams);
  }
};

// The rows of a slot follow their parents, and each gets its new last element.
template <class T, class Last>
void advance_rows(T* rows, int64_t capacity, const BeamStepScratch& scratch, int32_t copy_count,
                  const Last& last) {
  if (capacity == 0) return;
  copy_rows(scratch.copies, copy_count, rows, capacity, reinterpret_cast<T*>(scratch.row),
            scratch.plan.length);
  for (int64_t beam = 0; beam < scratch.plan.num_beams; ++beam) {
    rows[beam * capacity + scratch.plan.length] = last(beam);
  }
}

inline void advance_beams(const BeamStepParams& params, BeamStepScratch& scratch) {
  const BeamSearchState& state = params.state;
  const BeamStepPlan& plan = scratch.plan;
  const int32_t num_beams = static_cast<int32_t>(plan.num_beams);
  const int32_t copies =
      order_row_copies_of(plan.parents, num_beams, scratch.readers, scratch.copies);
  const int64_t first = plan.slot * state.beams;
  advance_rows(state.sequences + first * state.capacity, state.capacity, scratch, copies,
               [&](int64_t beam) { return params.next_tokens[plan.row + beam]; });
  advance_rows(state.log_probs + first * state.log_prob_capacity, state.log_prob_capacity, scratch,
               copies, [&](int64_t beam) { return plan.log_probs[beam]; });
  advance_rows(state.beam_indices + first * state.beam_index_capacity, state.beam_index_capacity,
               scratch, copies, [&](int64_t beam) { return plan.parents[beam]; });
}

// Requests [begin, end); memory: BeamStepScratch::bytes, aligned to 8.
inline void beam_step_requests(const BeamStepParams& params, int64_t begin, int64_t end,
                               void* memory) {
  BeamStepScratch scratch(params.state, memory);
  for (int64_t request = begin; request < end; ++request) {
    plan_beam_step(params, request, scratch.plan);
    if (scratch.plan.closes) close_hypotheses(params, request, scratch.plan, {});
    if (scratch.plan.advances) advance_beams(params, scratch);
  }
}

}  // namespace lmdecode::beam
