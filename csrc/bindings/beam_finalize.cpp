// beam_finalize on CPU tensors.
#include "bindings/beam_finalize.h"

#include "bindings/beam_slot_checks.h"

namespace lmdecode::beam {
namespace {

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
  using Guard = NoGuard;
  static void check(const BeamFinalizeParams& params) { check_beam_finalize(params); }
  static void run(const BeamFinalizeParams& params, const Tensor&) { beam_finalize_cpu(params); }
};

}  // namespace
}  // namespace lmdecode::beam

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("beam_finalize", TORCH_BOX((&lmdecode::beam::BeamFinalizeOp<lmdecode::beam::Cpu>::call)));
}
