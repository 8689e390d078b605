// gather_tree: the sequences that the tokens and parents of each step of a beam search spell.
// docs/reference/decoder.md is the user's page.
#pragma once

#include <cstdint>

namespace lmdecode::decoder {

template <class T>
struct GatherTreeParams {
  int64_t steps = 0;
  int64_t batch = 0;
  int64_t beams = 0;
  const T* step_ids = nullptr;    // [steps, batch, beams]
  const T* parent_ids = nullptr;  // [steps, batch, beams]: 0 to beams - 1
  const T* lengths = nullptr;     // [batch]
  T end_token = 0;
  T* sequences = nullptr;  // [steps, batch, beams]; end_token after the first one, and the length
};

// The place where a trace met an invalid parent, if any.
struct GatherTreeFault {
  bool is_found = false;
  int64_t step = 0, batch = 0, beam = 0, parent = 0;
};

template <class T>
GatherTreeFault gather_tree_cpu(const GatherTreeParams<T>& p) {
  GatherTreeFault fault;
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    const int64_t length = p.lengths[batch] < p.steps ? p.lengths[batch] : p.steps;
    for (int64_t beam = 0; beam < p.beams; ++beam) {
      const auto at = [&](int64_t step, int64_t b) {
        return (step * p.batch + batch) * p.beams + b;
      };
      for (int64_t step = length > 0 ? length : 0; step < p.steps; ++step) {
        p.sequences[at(step, beam)] = p.end_token;
      }
      int64_t from = beam;
      for (int64_t step = length - 1; step >= 0; --step) {
        if (from < 0 || from >= p.beams) {
          return {true, step + 1, batch, beam, from};
        }
        p.sequences[at(step, beam)] = p.step_ids[at(step, from)];
        from = p.parent_ids[at(step, from)];
      }
      bool has_ended = false;
      for (int64_t step = 0; step < length; ++step) {
        T& token = p.sequences[at(step, beam)];
        if (has_ended) token = p.end_token;
        has_ended = has_ended || token == p.end_token;
      }
    }
  }
  return fault;
}

}  // namespace lmdecode::decoder
