// Requests to threads, and the sequences in memory.
#include <cstring>

#include "beam/beam_step.h"
#include "beam/beam_step_plan.h"
#include "beam/beam_tuning.h"
#include "common/parallel_workspace.h"
#include "common/row_copies.h"

namespace lmdecode {
namespace {

// Scratch of a thread, behind one another; the widest elements first.
struct Scratch {
  unsigned char* row;  // [capacity] of the widest element
  RowCopy* copies;     // [max_row_copies(beams)]
  BeamStepPlan plan;
  int32_t* readers;  // [beams]

  static size_t bytes(const BeamSearchState& state) {
    return static_cast<size_t>(state.capacity) * sizeof(int64_t) +
           static_cast<size_t>(max_row_copies(state.beams)) * sizeof(RowCopy) +
           static_cast<size_t>(3 * state.beams + state.hypotheses) * sizeof(int32_t);
  }

  Scratch(const BeamSearchState& state, void* memory)
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
void advance_rows(T* rows, int64_t capacity, const Scratch& scratch, int32_t copy_count,
                  const Last& last) {
  if (capacity == 0) return;
  T* const temporary = reinterpret_cast<T*>(scratch.row);
  const auto row = [&](int32_t r) { return r == kTemporaryRow ? temporary : rows + r * capacity; };
  const size_t bytes = static_cast<size_t>(scratch.plan.length) * sizeof(T);
  for (int32_t i = 0; i < copy_count; ++i) {
    std::memcpy(row(scratch.copies[i].to), row(scratch.copies[i].from), bytes);
  }
  for (int64_t beam = 0; beam < scratch.plan.num_beams; ++beam) {
    rows[beam * capacity + scratch.plan.length] = last(beam);
  }
}

void advance(const BeamStepParams& params, Scratch& scratch) {
  const BeamSearchState& state = params.state;
  const BeamStepPlan& plan = scratch.plan;
  const int32_t num_beams = static_cast<int32_t>(plan.num_beams);
  for (int32_t beam = 0; beam < num_beams; ++beam) scratch.readers[beam] = 0;
  for (int32_t beam = 0; beam < num_beams; ++beam) {
    if (plan.parents[beam] != beam) ++scratch.readers[plan.parents[beam]];
  }
  const int32_t copies = order_row_copies(plan.parents, num_beams, scratch.readers, scratch.copies);
  const int64_t first = plan.slot * state.beams;
  advance_rows(state.sequences + first * state.capacity, state.capacity, scratch, copies,
               [&](int64_t beam) { return params.next_tokens[plan.row + beam]; });
  advance_rows(state.log_probs + first * state.log_prob_capacity, state.log_prob_capacity, scratch,
               copies, [&](int64_t beam) { return plan.log_probs[beam]; });
  advance_rows(state.beam_indices + first * state.beam_index_capacity, state.beam_index_capacity,
               scratch, copies, [&](int64_t beam) { return plan.parents[beam]; });
}

}  // namespace

void beam_step_cpu(const BeamStepParams& params) {
  const BeamSearchState& state = params.state;
  const double nanoseconds =
      beam_tuning::kStepNanoseconds +
      static_cast<double>(params.num_candidates) * beam_tuning::kStepNanosecondsPerCandidate +
      static_cast<double>(state.beams * state.capacity) * beam_tuning::kStepNanosecondsPerToken;
  const int64_t grain = 1 + static_cast<int64_t>(beam_tuning::kMinTaskNanoseconds / nanoseconds);
  parallel_with_workspace(
      "beam_step", params.requests, grain, Scratch::bytes(state),
      [&](int64_t begin, int64_t end, void* memory) {
        Scratch scratch(state, memory);
        for (int64_t request = begin; request < end; ++request) {
          plan_beam_step(params, request, scratch.plan);
          if (scratch.plan.closes) close_hypotheses(params, request, scratch.plan, {});
          if (scratch.plan.advances) advance(params, scratch);
        }
      },
      [] { return std::string(); });
}

}  // namespace lmdecode
