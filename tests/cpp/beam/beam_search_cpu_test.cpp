// beam_step and beam_finalize on the CPU: sequences follow parents, and nothing else is touched.
#include <iostream>
#include <memory>

#include "beam/beam_finalize_cpu.h"
#include "beam/beam_step_cpu.h"
#include "beam_search_case.h"
#include "check.h"

namespace lmdecode::beam::test {
namespace {

StepResult step(const SearchCase& c, const StateMemory& memory) {
  StepResult result(c);
  const BeamStepParams params = result.into(c.step_params(memory));
  const std::vector<int64_t> scratch(BeamStepScratch::bytes(params.state) / 8 + 1);
  beam_step_requests(params, 0, params.requests, const_cast<int64_t*>(scratch.data()));
  return result;
}

FinalResult finalize(const SearchCase& c, const StateMemory& memory, int64_t results,
                     bool add_open) {
  BeamFinalizeParams params = c.finalize_params(memory, results, add_open);
  FinalResult result(params);
  params = result.into(params);
  std::vector<int32_t> scratch(beam_finalize_scratch_bytes(params) / 4);
  for (int64_t request = 0; request < params.requests; ++request) {
    beam_finalize_request(params, request, scratch.data());
  }
  return result;
}

// One part of the state: a row's first elements are those of its parent's row, then the new one.
template <class T, class Last>
void check_rows(const Buffer<T>& before, const Buffer<T>& after, int64_t capacity, int64_t beams,
                int64_t slot, const BeamStepPlan& plan, const Last& last) {
  if (capacity == 0) return;
  for (int64_t beam = 0; beam < beams; ++beam) {
    const bool is_next = beam < plan.num_beams;
    const T* const row = after.data() + (slot * beams + beam) * capacity;
    const int64_t parent = is_next ? plan.parents[beam] : beam;
    const T* const from = before.data() + (slot * beams + parent) * capacity;
    const T* const own = before.data() + (slot * beams + beam) * capacity;
    for (int64_t i = 0; i < capacity; ++i) {
      const T expected = !is_next || i > plan.length ? own[i]
                         : i < plan.length           ? from[i]
                                                     : last(beam);
      CHECK(row[i] == expected);
    }
  }
}

// The plan of a request alone, from a state that is thrown away.
struct Planned {
  StateMemory memory;
  StepResult result;
  BeamStepScratch scratch;
  std::unique_ptr<unsigned char[]> room;

  Planned(const SearchCase& c, const StateMemory& before, int64_t request)
      : memory(before.copy()), result(c), scratch(before.sizes, nullptr) {
    const size_t bytes = BeamStepScratch::bytes(before.sizes);
    room = std::make_unique<unsigned char[]>(bytes);
    scratch = BeamStepScratch(before.sizes, room.get());
    plan_beam_step(result.into(c.step_params(memory)), request, scratch.plan);
  }
};

void check_step(const SearchCase& c, const StateMemory& before, const StateMemory& after,
                const StepResult& result) {
  const BeamSearchState& s = before.sizes;
  for (int64_t r = 0; r < c.requests; ++r) {
    const Planned planned(c, before, r);
    const BeamStepPlan& plan = planned.scratch.plan;
    if (plan.slot == kNoPlace || !plan.advances) continue;
    check_rows(before.sequences, after.sequences, s.capacity, s.beams, plan.slot, plan,
               [&](int64_t beam) { return result.tokens[plan.row + beam]; });
    check_rows(before.log_probs, after.log_probs, s.log_prob_capacity, s.beams, plan.slot, plan,
               [&](int64_t beam) { return plan.log_probs[beam]; });
    check_rows(before.beam_indices, after.beam_indices, s.beam_index_capacity, s.beams, plan.slot,
               plan, [&](int64_t beam) { return plan.parents[beam]; });
    for (int64_t place = 0; place < s.hypotheses; ++place) {
      const int64_t source = plan.sources[place], at = plan.slot * s.hypotheses + place;
      const int64_t* const row = after.hypothesis_sequences.data() + at * s.capacity;
      const int64_t* const old = before.hypothesis_sequences.data() + at * s.capacity;
      const int64_t candidate = r * c.num_candidates + source;
      for (int64_t i = 0; i < s.capacity; ++i) {
        int64_t expected = old[i];
        if (source != kNoSource && i < plan.length) {
          const int64_t beam = plan.slot * s.beams + c.beams[candidate];
          expected = before.sequences[beam * s.capacity + i];
        } else if (source != kNoSource && i == plan.length && c.dialect != BeamDialect::kScorer) {
          expected = c.tokens[candidate];
        }
        CHECK_EQ(row[i], expected);
      }
    }
  }
}

int64_t steps_run = 0;

TEST(sequences_move_as_the_parents_say) {
  for (uint64_t seed = 0; seed < 4000; ++seed) {
    SearchCase c(seed, false);
    for (int i = 0; i < 12 && c.has_room(); ++i) {
      const StateMemory before = c.memory.copy();
      const StepResult result = step(c, c.memory);
      if (!c.keeps_sequences) check_step(c, before, c.memory, result);
      ++steps_run;
      c.new_candidates();
    }
    finalize(c, c.memory, 1 + c.random.below(8), c.random.chance(0.5));
  }
  std::cout << steps_run << " steps" << std::endl;
}

TEST(whatever_the_tensors_hold_nothing_outside_is_touched) {
  for (uint64_t seed = 0; seed < 6000; ++seed) {
    SearchCase c(seed, true, seed % 4 == 0);
    for (int i = 0; i < 8 && c.has_room(); ++i) {
      step(c, c.memory);
      c.new_candidates();
    }
    finalize(c, c.memory, 1 + c.random.below(40), c.random.chance(0.5));
  }
}

TEST(a_request_does_not_depend_on_the_others) {
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    SearchCase c(seed, false);
    if (!c.has_room()) continue;
    const StateMemory together = c.memory.copy(), apart = c.memory.copy();
    const StepResult expected = step(c, together);
    StepResult result(c);
    const BeamStepParams params = result.into(c.step_params(apart));
    std::vector<int64_t> scratch(BeamStepScratch::bytes(params.state) / 8 + 1);
    for (int64_t r = c.requests; r-- > 0;) beam_step_requests(params, r, r + 1, scratch.data());
    CHECK(result == expected);
    CHECK(apart == together);
  }
}

}  // namespace
}  // namespace lmdecode::beam::test

CHECK_MAIN()
