// beam_step on CPU tensors.
#include "bindings/beam_step.h"

#include "beam/beam_rules.h"
#include "bindings/beam_slot_checks.h"

namespace lmdecode::beam {
namespace {

void check_row_offsets(const BeamStepParams& p) {
  const char* const op = kBeamStepOp;
  if (p.offsets.data == nullptr) return;
  if (p.offsets.at(0, 0) != 0 || p.offsets.at(p.requests, 0) != p.rows) {
    fail(op, "row_offsets takes the rows ", p.offsets.at(0, 0), " to ", p.offsets.at(p.requests, 0),
         "; expected 0 to ", p.rows);
  }
  for (int64_t r = 0; r < p.requests; ++r) {
    const int64_t slot = p.slots.data == nullptr ? r : p.slots.at(r, 0);
    const int64_t beams = p.parameters.num_beams[slot];
    if (p.offsets.at(r + 1, 0) - p.offsets.at(r, 0) != beams) {
      fail(op, "row_offsets gives request ", r, " the rows ", p.offsets.at(r, 0), " to ",
           p.offsets.at(r + 1, 0), "; expected as many as its num_beams, ", beams);
    }
  }
}

void check_beam_step(const BeamStepParams& p) {
  const char* const op = kBeamStepOp;
  check_slots(op, p.slots, p.requests, p.state.slots);
  const bool is_kept = !p.sequences.is_given;
  for (int64_t r = 0; r < p.requests; ++r) {
    const int64_t slot = p.slots.data == nullptr ? r : p.slots.at(r, 0);
    check_slot(op, p.state, p.parameters, slot, is_kept ? -1 : p.sequences.length);
    if (is_kept && p.state.done[slot] == 0 && p.state.lengths[slot] >= p.state.capacity) {
      fail(op, "state.lengths[", slot, "] is ", p.state.lengths[slot],
           "; expected less than the capacity of the state, ", p.state.capacity,
           ", where a search goes on");
    }
    if (p.parents.data != nullptr && p.parents.at(r, 0) < 0) {
      fail(op, "parent_offsets[", r, "] is ", p.parents.at(r, 0), "; expected a row");
    }
    const int64_t beams = p.parameters.num_beams[slot];
    for (int64_t i = 0; i < p.num_candidates; ++i) {
      const int64_t beam = p.beams.at(r, i);
      if (beam >= 0 && beam < beams) continue;
      if (BeamSearchSlot(p.state, p.parameters, slot, p.rules).takes_part(p.scores.at(r, i))) {
        fail(op, "beams[", r, ", ", i, "] is ", beam, "; expected 0 to ", beams - 1,
             ", the beams of the request");
      }
    }
  }
  check_row_offsets(p);
}

struct Cpu {
  using Guard = NoGuard;
  static void check(const BeamStepParams& params) { check_beam_step(params); }
  static void run(const BeamStepParams& params, const Tensor&) { beam_step_cpu(params); }
};

}  // namespace
}  // namespace lmdecode::beam

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("beam_step", TORCH_BOX((&lmdecode::beam::BeamStepOp<lmdecode::beam::Cpu>::call)));
}
