// What the state and the parameters hold for the slots of a call, looked at on the CPU before
// anything is written.
#pragma once

#include "bindings/beam_search_checks.h"

namespace lmdecode::beam {

// Each slot of a call, once.
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

// Of one slot that a call is about. sequence_length: of the caller's, or below 0.
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
