// Random beam searches, for beam_step and beam_finalize, in heap buffers of exactly their size.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "beam/beam_finalize.h"
#include "beam/beam_rules.h"
#include "beam/beam_step.h"
#include "sampling/sample_case.h"

namespace lmdecode::beam::test {

using sampling::test::Buffer;
using sampling::test::Random;

// The memory of a BeamSearchState; a copy has its own.
struct StateMemory {
  BeamSearchState sizes;  // without pointers
  Buffer<int64_t> sequences, lengths, hypothesis_sequences, hypothesis_lengths, hypothesis_numbers;
  Buffer<float> log_probs, scores, hypothesis_log_probs;
  Buffer<int32_t> beam_indices, hypothesis_beam_indices;
  Buffer<double> hypothesis_scores, worst_scores;
  Buffer<uint8_t> done, status;

  StateMemory() = default;
  explicit StateMemory(const BeamSearchState& s)
      : sizes(s),
        sequences(s.slots * s.beams * s.capacity),
        lengths(s.slots),
        hypothesis_sequences(s.slots * s.hypotheses * s.capacity),
        hypothesis_lengths(s.slots * s.hypotheses),
        hypothesis_numbers(s.slots * s.hypotheses),
        log_probs(s.slots * s.beams * s.log_prob_capacity),
        scores(s.slots * s.beams),
        hypothesis_log_probs(s.slots * s.hypotheses * s.log_prob_capacity),
        beam_indices(s.slots * s.beams * s.beam_index_capacity),
        hypothesis_beam_indices(s.slots * s.hypotheses * s.beam_index_capacity),
        hypothesis_scores(s.slots * s.hypotheses),
        worst_scores(s.slots),
        done(s.slots),
        status(s.slots) {}

  StateMemory copy() const {
    StateMemory to(sizes);
    each(*this, to, [](const auto& from, auto& into) {
      std::copy(from.data(), from.data() + from.size(), into.data());
    });
    return to;
  }

  bool operator==(const StateMemory& other) const {
    bool same = true;
    each(*this, other, [&](const auto& a, const auto& b) { same = same && a == b; });
    return same;
  }

  BeamSearchState state() const {
    BeamSearchState s = sizes;
    s.sequences = sequences.data();
    s.log_probs = log_probs.data();
    s.beam_indices = beam_indices.data();
    s.scores = scores.data();
    s.lengths = lengths.data();
    s.hypothesis_sequences = hypothesis_sequences.data();
    s.hypothesis_log_probs = hypothesis_log_probs.data();
    s.hypothesis_beam_indices = hypothesis_beam_indices.data();
    s.hypothesis_lengths = hypothesis_lengths.data();
    s.hypothesis_scores = hypothesis_scores.data();
    s.hypothesis_numbers = hypothesis_numbers.data();
    s.worst_scores = worst_scores.data();
    s.done = done.data();
    s.status = status.data();
    return s;
  }

 private:
  template <class A, class B, class Visit>
  static void each(A& a, B& b, const Visit& visit) {
    visit(a.sequences, b.sequences);
    visit(a.lengths, b.lengths);
    visit(a.hypothesis_sequences, b.hypothesis_sequences);
    visit(a.hypothesis_lengths, b.hypothesis_lengths);
    visit(a.hypothesis_numbers, b.hypothesis_numbers);
    visit(a.log_probs, b.log_probs);
    visit(a.scores, b.scores);
    visit(a.hypothesis_log_probs, b.hypothesis_log_probs);
    visit(a.beam_indices, b.beam_indices);
    visit(a.hypothesis_beam_indices, b.hypothesis_beam_indices);
    visit(a.hypothesis_scores, b.hypothesis_scores);
    visit(a.worst_scores, b.worst_scores);
    visit(a.done, b.done);
    visit(a.status, b.status);
  }
};

template <class T>
void fill(const Buffer<T>& buffer, T value) {
  std::fill(buffer.data(), buffer.data() + buffer.size(), value);
}

// A batch of searches and the candidates of a step. wild: indices, lengths and counts may be
// anything, as they may be in CUDA tensors, where nobody looks. conflicts: requests share a slot,
// and rows; the result is none to compare then.
struct SearchCase {
  Random random;
  bool wild;
  BeamDialect dialect;
  StateMemory memory;
  Buffer<int64_t> num_beams, num_hypotheses, prompt_lengths, max_lengths, early_stopping,
      end_tokens, pad_tokens;
  Buffer<double> length_penalty;
  int64_t num_end_tokens;
  int64_t requests, num_candidates, num_groups, rows;
  bool has_offsets, has_slots, keeps_sequences;
  Buffer<float> scores, log_probs, bonus;
  Buffer<int64_t> tokens, beams, slots, offsets, parents, sequences;
  Buffer<bool> stopped;
  Buffer<uint8_t> status;
  int64_t length = 0;  // of the caller's sequences

  SearchCase(uint64_t seed, bool wild_, bool conflicts = false)
      : random(seed * 7919 + wild_), wild(wild_) {
    dialect = random.any_of({BeamDialect::kGenerate, BeamDialect::kScorer, BeamDialect::kFairseq});
    BeamSearchState s;
    s.slots = 1 + random.below(4);
    s.beams = 1 + random.below(6);
    s.hypotheses = 1 + random.below(6);
    s.capacity = 2 + random.below(random.chance(0.2) ? 150 : 12);
    s.log_prob_capacity = random.chance(0.5) ? s.capacity : 0;
    s.beam_index_capacity = random.chance(0.5) ? s.capacity : 0;
    memory = StateMemory(s);
    set_parameters(s);
    fill(memory.hypothesis_numbers, int64_t{-1});
    fill(memory.worst_scores, 1e9);
    for (int64_t i = 0; wild && i < s.slots * s.hypotheses; ++i) {
      if (!random.chance(0.3)) continue;
      memory.hypothesis_numbers[i] = random.below(3);
      memory.hypothesis_lengths[i] = any(0, s.capacity);
      memory.hypothesis_scores[i] = random.any_of({-1.0, -2.5, std::nan(""), -HUGE_VAL});
    }
    keeps_sequences = random.chance(0.2);
    length = keeps_sequences ? random.below(s.capacity) : 0;
    for (int64_t slot = 0; slot < s.slots; ++slot) {
      memory.lengths[slot] = any(0, s.capacity / 2);
      if (!keeps_sequences) prompt_lengths[slot] = memory.lengths[slot];
    }
    has_slots = random.chance(0.5);
    num_groups = has_slots ? 1 : random.chance(0.3) ? s.slots : 1;
    requests = has_slots ? 1 + random.below(s.slots) : s.slots;
    slots = Buffer<int64_t>(requests);
    std::vector<int64_t> order;
    for (int64_t slot = 0; slot < s.slots; ++slot) {
      order.insert(order.begin() + random.below(slot + 1), slot);
    }
    for (int64_t r = 0; r < requests; ++r) {
      slots[r] = order[static_cast<size_t>(r)];
      if (wild && random.chance(0.2)) slots[r] = random.chance(0.5) ? -1 - r : s.slots + r;
      if (conflicts) slots[r] = order[0];
    }
    has_offsets = random.chance(0.5);
    offsets = Buffer<int64_t>(requests + 1);
    offsets[0] = 0;
    for (int64_t r = 0; r < requests; ++r) {
      const int64_t width = num_beams[has_slots ? order[static_cast<size_t>(r)] : r];
      offsets[r + 1] = offsets[r] + clamped(width, 1, s.beams);
    }
    rows = has_offsets ? offsets[requests] : requests * s.beams;
    if (wild) {
      for (int64_t r = 0; r <= requests; ++r) {
        if (random.chance(0.2)) offsets[r] = any(0, rows);
      }
      if (!conflicts) std::sort(offsets.data(), offsets.data() + requests + 1);
    }
    parents = Buffer<int64_t>(requests);
    for (int64_t r = 0; r < requests; ++r) parents[r] = any(0, 100);
    sequences = Buffer<int64_t>(requests * s.beams * length);
    for (int64_t i = 0; i < sequences.size(); ++i) sequences[i] = random.below(50);
    num_candidates = 1 + random.below(3 * s.beams);
    new_candidates();
  }

  // Whether every search that goes on has room for a token.
  bool has_room() const {
    if (keeps_sequences) return length < memory.sizes.capacity;
    if (wild) return true;
    for (int64_t slot = 0; slot < memory.sizes.slots; ++slot) {
      if (memory.done[slot] == 0 && memory.lengths[slot] >= memory.sizes.capacity) {
        return false;
      }
    }
    return true;
  }

  void new_candidates() {
    const int64_t size = requests * num_candidates;
    scores = Buffer<float>(size);
    log_probs = Buffer<float>(size);
    tokens = Buffer<int64_t>(size);
    beams = Buffer<int64_t>(size);
    stopped = Buffer<bool>(size);
    bonus = Buffer<float>(requests * memory.sizes.beams);
    status = Buffer<uint8_t>(requests);
    const int64_t vocab = random.any_of({3, 6, 40});
    for (int64_t i = 0; i < size; ++i) {
      const int64_t r = i / num_candidates, at = i % num_candidates;
      const int64_t slot = has_slots ? slots[r] : r;
      const int64_t width =
          slot >= 0 && slot < memory.sizes.slots ? num_beams[slot] : memory.sizes.beams;
      const double step = random.chance(0.2) ? 0.0 : random.uniform();
      scores[i] = static_cast<float>((at == 0 ? 0.0 : scores[i - 1]) - step);
      if (random.chance(0.05)) scores[i] = -HUGE_VALF;
      if (wild && random.chance(0.1)) {
        scores[i] = random.any_of({HUGE_VALF, std::nanf(""), 3e38f, -3e38f});
      }
      log_probs[i] = static_cast<float>(-random.uniform());
      tokens[i] = random.below(vocab);
      beams[i] = any(0, clamped(width, 1, memory.sizes.beams));
      stopped[i] = random.chance(0.1);
    }
    for (int64_t i = 0; i < bonus.size(); ++i) bonus[i] = static_cast<float>(random.normal());
    for (int64_t r = 0; r < requests; ++r) status[r] = random.chance(0.05) ? 2 : 0;
    has_log_probs = random.chance(0.5);
    has_stopped = random.chance(0.2);
    has_bonus = random.chance(0.2);
    has_status = random.chance(0.3);
    has_parents = random.chance(0.2);
  }

  BeamSearchParameters parameters() const {
    return {num_beams.data(),   num_hypotheses.data(), prompt_lengths.data(),
            max_lengths.data(), length_penalty.data(), early_stopping.data(),
            end_tokens.data(),  pad_tokens.data(),     num_end_tokens};
  }

  CallerSequences caller_sequences() const {
    if (!keeps_sequences) return {};
    return {true, sequences.data(), length, memory.sizes.beams * length, length, 1};
  }

  // Without outputs.
  BeamStepParams step_params(const StateMemory& state) const {
    BeamStepParams p;
    p.state = state.state();
    p.parameters = parameters();
    p.dialect = dialect;
    p.requests = requests;
    p.num_candidates = num_candidates;
    p.rows = rows;
    p.scores = {scores.data(), num_candidates, 1};
    p.tokens = {tokens.data(), num_candidates, 1};
    p.beams = {beams.data(), num_candidates, 1};
    if (has_log_probs) p.log_probs = {log_probs.data(), num_candidates, 1};
    if (has_stopped) p.stopped = {stopped.data(), num_candidates, 1};
    if (has_bonus) p.bonus = {bonus.data(), memory.sizes.beams, 1};
    if (has_status) p.status = {status.data(), 1, 0};
    if (has_slots) p.slots = {slots.data(), 1, 0};
    if (has_offsets) p.offsets = {offsets.data(), 1, 0};
    if (has_parents) p.parents = {parents.data(), 1, 0};
    if (has_parents) p.parent_count = requests;
    p.sequences = caller_sequences();
    return p;
  }

  BeamFinalizeParams finalize_params(const StateMemory& state, int64_t results,
                                     bool add_open) const {
    BeamFinalizeParams p;
    p.state = state.state();
    p.parameters = parameters();
    p.dialect = dialect;
    p.requests = requests / num_groups;
    p.num_groups = num_groups;
    p.num_return_sequences = results;
    p.add_open = add_open;
    if (has_slots) p.slots = {slots.data(), 1, 0};
    p.sequences = caller_sequences();
    if (keeps_sequences) p.scores = {bonus.data(), memory.sizes.beams, 1};
    return p;
  }

  bool has_log_probs, has_stopped, has_bonus, has_status, has_parents;

 private:
  // In [low, high), or at times anything where the case is wild.
  int64_t any(int64_t low, int64_t high) {
    if (wild && random.chance(0.1)) {
      return random.any_of<int64_t>({-1, high, high + 1, -1000000, int64_t{1} << 40,
                                     -(int64_t{1} << 62), std::numeric_limits<int64_t>::max()});
    }
    return low + random.below(high - low < 1 ? 1 : high - low);
  }

  void set_parameters(const BeamSearchState& s) {
    num_beams = Buffer<int64_t>(s.slots);
    num_hypotheses = Buffer<int64_t>(s.slots);
    prompt_lengths = Buffer<int64_t>(s.slots);
    max_lengths = Buffer<int64_t>(s.slots);
    early_stopping = Buffer<int64_t>(s.slots);
    pad_tokens = Buffer<int64_t>(s.slots);
    length_penalty = Buffer<double>(s.slots);
    num_end_tokens = random.below(3);
    end_tokens = Buffer<int64_t>(s.slots * num_end_tokens);
    for (int64_t slot = 0; slot < s.slots; ++slot) {
      num_beams[slot] = any(1, s.beams + 1);
      num_hypotheses[slot] = any(1, s.hypotheses + 1);
      max_lengths[slot] = random.chance(0.5) ? 0 : any(1, s.capacity + 2);
      early_stopping[slot] = any(0, 3);
      pad_tokens[slot] = random.below(50);
      length_penalty[slot] = random.any_of({1.0, 0.0, -1.0, 2.0, 0.7, 400.0, -400.0, std::nan("")});
    }
    for (int64_t i = 0; i < end_tokens.size(); ++i) end_tokens[i] = random.below(4) - 1;
  }
};

struct StepResult {
  Buffer<float> scores;
  Buffer<int64_t> tokens, parents;
  Buffer<int32_t> decisions;

  explicit StepResult(const SearchCase& c)
      : scores(c.rows), tokens(c.rows), parents(c.rows), decisions(c.requests * c.num_candidates) {
    fill(scores, 77.0f);  // rows that wild offsets leave out are not written
    fill(tokens, int64_t{77});
    fill(parents, int64_t{77});
  }
  BeamStepParams into(BeamStepParams p) const {
    p.next_scores = scores.data();
    p.next_tokens = tokens.data();
    p.next_parents = parents.data();
    p.decisions = decisions.data();
    return p;
  }
  bool operator==(const StepResult& other) const {
    return scores == other.scores && tokens == other.tokens && parents == other.parents &&
           decisions == other.decisions;
  }
};

struct FinalResult {
  Buffer<int64_t> sequences, lengths, places;
  Buffer<double> scores;
  Buffer<float> log_probs;
  Buffer<int32_t> beam_indices;

  explicit FinalResult(const BeamFinalizeParams& p) {
    const int64_t size = p.requests * p.num_return_sequences;
    sequences = Buffer<int64_t>(size * p.state.capacity);
    lengths = Buffer<int64_t>(size);
    places = Buffer<int64_t>(size);
    scores = Buffer<double>(size);
    log_probs = Buffer<float>(size * p.state.log_prob_capacity);
    beam_indices = Buffer<int32_t>(size * p.state.beam_index_capacity);
  }
  BeamFinalizeParams into(BeamFinalizeParams p) const {
    p.best_sequences = sequences.data();
    p.best_lengths = lengths.data();
    p.best_scores = scores.data();
    p.best_log_probs = log_probs.data();
    p.best_beam_indices = beam_indices.data();
    p.best_places = places.data();
    return p;
  }
  bool operator==(const FinalResult& other) const {
    return sequences == other.sequences && lengths == other.lengths && places == other.places &&
           scores == other.scores && log_probs == other.log_probs &&
           beam_indices == other.beam_indices;
  }
};

}  // namespace lmdecode::beam::test
