// beam_step and beam_finalize on CPU tensors.
#include "bindings/beam_search.h"

#include "beam/beam_rules.h"

namespace lmdecode::beam {
namespace {

// Each slot of a call, once.
void check_slots(const char* op, const RequestRows<int64_t>& slots, int64_t entries,
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

void check_range(const char* op, const char* name, int64_t slot, int64_t value, int64_t low,
                 int64_t high, const char* why) {
  if (value >= low && value <= high) return;
  fail(op, name, "[", slot, "] is ", value, "; expected ", low, " to ", high, why);
}

// Of one slot that a call is about. sequence_length: of the caller's, or below 0.
void check_slot(const char* op, const BeamSearchState& state, const BeamSearchParameters& p,
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

void check_beam_finalize(const BeamFinalizeParams& p) {
  const char* const op = kBeamFinalizeOp;
  const int64_t entries = p.requests * p.num_groups;
  check_slots(op, p.slots, entries, p.state.slots);
  for (int64_t entry = 0; entry < entries; ++entry) {
    const int64_t slot = p.slots.data == nullptr ? entry : p.slots.at(entry, 0);
    const bool is_kept = !p.sequences.is_given;
    check_slot(op, p.state, p.parameters, slot, is_kept ? -1 : p.sequences.length);
    for (int64_t place = 0; place < p.parameters.num_hypotheses[slot]; ++place) {
      const int64_t at = slot * p.state.hypotheses + place;
      const int64_t length = p.state.hypothesis_lengths[at];
      if (p.state.hypothesis_numbers[at] >= 0 && (length < 0 || length > p.state.capacity)) {
        fail(op, "state.hypothesis_lengths[", slot, ", ", place, "] is ", length,
             "; expected 0 to ", p.state.capacity, ", the capacity of the state");
      }
    }
  }
}

struct Cpu {
  struct Guard {
    explicit Guard(const Tensor&) {}
  };
  static void check(const BeamStepParams& params) { check_beam_step(params); }
  static void check(const BeamFinalizeParams& params) { check_beam_finalize(params); }
  static void run(const BeamStepParams& params, const Tensor&) { beam_step_cpu(params); }
  static void run(const BeamFinalizeParams& params, const Tensor&) { beam_finalize_cpu(params); }
};

}  // namespace
}  // namespace lmdecode::beam

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  using namespace lmdecode::beam;
  m.impl("beam_step", TORCH_BOX((&BeamStepOp<Cpu>::call)));
  m.impl("beam_finalize", TORCH_BOX((&BeamFinalizeOp<Cpu>::call)));
}
