// beam_finalize for one request: open beams get their places, then the hypotheses their ranks, then
// the best ones are copied. CPU and CUDA run this same code.
#pragma once

#include "beam/beam_finalize.h"
#include "beam/beam_rules.h"
#include "beam/hypothesis_copies.h"

namespace lmdecode::beam {

constexpr int32_t kNoBeam = -1;

// Gives the running beams of one slot places among its hypotheses, where its search is not done;
// one thread's work. open_beams [hypotheses]: the beam that takes each place, or kNoBeam.
LMD_HOST_DEVICE void add_open_beams(const BeamFinalizeParams& p, int64_t entry,
                                    int32_t* open_beams) {
  const BeamSearchState& state = p.state;
  for (int64_t place = 0; place < state.hypotheses; ++place) open_beams[place] = kNoBeam;
  const int64_t index = p.slot_of(entry);
  if (!p.add_open || index < 0 || state.done[index] != 0) return;
  const BeamSearchSlot slot(state, p.parameters, index, p.dialect);
  const int64_t length =
      p.sequences.is_given ? p.sequences.length : clamped(state.lengths[index], 0, state.capacity);
  const double by = slot.divisor(static_cast<double>(length - slot.prompt_length));
  for (int64_t beam = 0; beam < slot.num_beams; ++beam) {
    const float score = p.scores.data != nullptr ? p.scores.at(entry, beam)
                                                 : state.scores[index * state.beams + beam];
    if (!slot.takes_part(score)) continue;
    const int64_t place = slot.add_hypothesis(slot.normalised(score, by, 0.0));
    if (place == kNoPlace) continue;
    open_beams[place] = static_cast<int32_t>(beam);
    state.hypothesis_lengths[index * state.hypotheses + place] = length;
  }
}

// The sequences of the hypotheses that were open beams.
LMD_HOST_DEVICE void copy_open_beams(const BeamFinalizeParams& p, int64_t entry,
                                     const int32_t* open_beams, Columns columns) {
  NewHypothesis open{};
  open.slot = p.slot_of(entry);
  if (open.slot < 0) return;
  open.length = p.sequences.is_given ? p.sequences.length
                                     : clamped(p.state.lengths[open.slot], 0, p.state.capacity);
  for (int64_t place = 0; place < p.state.hypotheses; ++place) {
    if (open_beams[place] == kNoBeam) continue;
    open.place = place;
    open.beam = open_beams[place];
    copy_hypothesis(p.state, p.sequences, entry, open, columns);
  }
}

namespace beam_finalize_detail {

struct Ranked {
  double score;
  int64_t group, number, place;  // number: below 0, no hypothesis
};

LMD_HOST_DEVICE Ranked hypothesis_at(const BeamFinalizeParams& p, int64_t request, int64_t place) {
  const BeamSearchState& state = p.state;
  const int64_t group = place / state.hypotheses;
  const int64_t slot = p.slot_of(request * p.num_groups + group);
  if (slot < 0) return {0.0, group, -1, place};
  const int64_t in_slot = place % state.hypotheses;
  const int64_t num_hypotheses = clamped(p.parameters.num_hypotheses[slot], 1, state.hypotheses);
  const int64_t at = slot * state.hypotheses + in_slot;
  const int64_t number = in_slot < num_hypotheses ? state.hypothesis_numbers[at] : -1;
  return {state.hypothesis_scores[at], group, number, place};
}

// A total order whatever the state holds: NaN comes last, and of one number the lower place first.
LMD_HOST_DEVICE bool is_better(const Ranked& a, const Ranked& b, bool last_first) {
  const bool a_is_nan = a.score != a.score, b_is_nan = b.score != b.score;
  if (a_is_nan != b_is_nan) return b_is_nan;
  if (!a_is_nan && a.score != b.score) return a.score > b.score;
  const bool is_earlier = a.group != b.group     ? a.group < b.group
                          : a.number != b.number ? a.number < b.number
                                                 : a.place < b.place;
  return is_earlier != last_first;
}

}  // namespace beam_finalize_detail

// The rank of a place (group * hypotheses + place) among all of the request, from 0; -1 where there
// is no hypothesis.
LMD_HOST_DEVICE int64_t hypothesis_rank(const BeamFinalizeParams& p, int64_t request,
                                        int64_t place) {
  using beam_finalize_detail::hypothesis_at;
  const auto own = hypothesis_at(p, request, place);
  if (own.number < 0) return -1;
  // Among equal scores, "scorer" returns the last one first: it pops from the end.
  const bool last_first = p.dialect == BeamDialect::kScorer;
  int64_t rank = 0;
  for (int64_t other = 0; other < p.num_groups * p.state.hypotheses; ++other) {
    if (other == place) continue;
    const auto theirs = hypothesis_at(p, request, other);
    if (theirs.number >= 0 && beam_finalize_detail::is_better(theirs, own, last_first)) ++rank;
  }
  return rank;
}

// Result `rank` of the request; place: the hypothesis that it is, or kNoPlace.
LMD_HOST_DEVICE void write_result(const BeamFinalizeParams& p, int64_t request, int64_t rank,
                                  int64_t place, Columns columns) {
  const BeamSearchState& state = p.state;
  const int64_t to = request * p.num_return_sequences + rank;
  const int64_t first_slot = p.slot_of(request * p.num_groups);
  const int64_t pad_token = first_slot < 0 ? 0 : p.parameters.pad_tokens[first_slot];
  int64_t from = 0, length = 0, end_token = pad_token;
  double score = kNeverScore;
  if (place != kNoPlace) {
    const int64_t slot = p.slot_of(request * p.num_groups + place / state.hypotheses);
    from = slot * state.hypotheses + place % state.hypotheses;
    length = clamped(state.hypothesis_lengths[from], 0, state.capacity);
    score = state.hypothesis_scores[from];
    if (p.dialect == BeamDialect::kScorer) {
      const int64_t* const end_tokens =
          p.parameters.end_tokens + slot * p.parameters.num_end_tokens;
      for (int64_t i = p.parameters.num_end_tokens - 1; i >= 0; --i) {
        if (end_tokens[i] >= 0) end_token = end_tokens[i];
      }
    }
  }
  if (columns.first == 0) {
    p.best_lengths[to] = length;
    p.best_scores[to] = score;
    p.best_places[to] = place;
  }
  for (int64_t column = columns.first; column < state.capacity; column += columns.step) {
    p.best_sequences[to * state.capacity + column] =
        place != kNoPlace && column < length
            ? state.hypothesis_sequences[from * state.capacity + column]
        : column == length ? end_token
                           : pad_token;
  }
  for (int64_t column = columns.first; column < state.log_prob_capacity; column += columns.step) {
    p.best_log_probs[to * state.log_prob_capacity + column] =
        place == kNoPlace ? 0.0f
                          : state.hypothesis_log_probs[from * state.log_prob_capacity + column];
  }
  for (int64_t column = columns.first; column < state.beam_index_capacity; column += columns.step) {
    p.best_beam_indices[to * state.beam_index_capacity + column] =
        place == kNoPlace
            ? -1
            : state.hypothesis_beam_indices[from * state.beam_index_capacity + column];
  }
}

}  // namespace lmdecode::beam
