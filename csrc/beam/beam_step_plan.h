// beam_step's decisions for one request: everything but the sequences is written here, and how
// those move is left in a plan. One thread's work, on the CPU and in CUDA alike.
#pragma once

#include "beam/beam_rules.h"
#include "beam/beam_step.h"
#include "beam/hypothesis_copies.h"

namespace lmdecode::beam {

// The low bits of a decision; the rest is the next beam, or the place among the hypotheses.
constexpr int32_t kDecisionContinued = 1;
constexpr int32_t kDecisionClosed = 2;
constexpr int32_t kDecisionEndTokenTooLow = 3;
constexpr int32_t kDecisionNotBetter = 4;
constexpr int32_t kDecisionStopped = 5;
constexpr int32_t kDecisionMask = 7;
constexpr int kDecisionBits = 3;

constexpr int32_t kNoSource = -1;

struct BeamStepPlan {
  int32_t* parents;  // [beams]: the running beam that each next beam continues
  float* log_probs;  // [beams]: of their tokens
  int32_t* sources;  // [hypotheses]: the candidate that takes this place, or kNoSource

  int64_t slot;       // kNoPlace: nothing moves
  int64_t row;        // of the first next beam
  int64_t num_beams;  // next beams
  int64_t length;     // of the running sequences
  bool closes;        // a place has a source
  bool advances;      // the running sequences go on
};

namespace beam_step_detail {

LMD_HOST_DEVICE int64_t row_at(const RequestRows<int64_t>& offsets, int64_t request) {
  return clamped(offsets.at(request, 0), 0, kMaxLength);
}

// The state of the decision about one request.
struct Request {
  const BeamStepParams& params;
  BeamStepPlan& plan;
  int64_t request;
  int64_t parent_first;
  int64_t num_next;

  LMD_HOST_DEVICE void add_next(float score, int64_t token, int64_t beam, float log_prob,
                                int64_t parent) {
    const int64_t row = plan.row + num_next;
    params.next_scores[row] = score;
    params.next_tokens[row] = token;
    params.next_parents[row] = parent;
    plan.parents[num_next] = static_cast<int32_t>(beam);
    plan.log_probs[num_next] = log_prob;
    ++num_next;
  }

  // The candidate goes on, with this score.
  LMD_HOST_DEVICE void go_on(int64_t i, float score) {
    const int64_t beam = params.beams.at(request, i);
    const float log_prob =
        params.log_probs.data == nullptr ? 0.0f : params.log_probs.at(request, i);
    add_next(score, params.tokens.at(request, i), beam, log_prob, parent_first + beam);
  }

  // The row of this beam, or the request's last one where it is known to have fewer.
  LMD_HOST_DEVICE int64_t own_row(int64_t beam) const {
    if (params.parents.data == nullptr && params.offsets.data == nullptr) {
      return parent_first + beam;
    }
    const bool given = params.parents.data != nullptr;
    if (!given || request + 1 < params.parent_count) {
      const int64_t next = row_at(given ? params.parents : params.offsets, request + 1);
      const int64_t last = next - parent_first - 1;
      if (beam > last) beam = last > 0 ? last : 0;
    }
    return parent_first + beam;
  }
};

// Whether the request's beams go on; its search may be done then, all the same.
LMD_HOST_DEVICE bool decide(Request& r, const BeamSearchSlot& slot, int32_t* decisions) {
  const BeamStepParams& p = r.params;
  BeamStepPlan& plan = r.plan;
  const BeamSearchState& state = p.state;
  const bool was_done = state.done[plan.slot] != 0;
  const bool is_scorer = slot.dialect == BeamDialect::kScorer;
  const bool at_end = !is_scorer && slot.max_length > 0 && slot.max_length <= plan.length + 1;
  const double by = slot.divisor(static_cast<double>(plan.length + 1 - slot.prompt_length));
  float best = -HUGE_VALF;
  for (int64_t i = 0; i < p.num_candidates; ++i) {
    const float score = p.scores.at(r.request, i);
    if (!slot.takes_part(score)) continue;
    const int64_t beam = p.beams.at(r.request, i);
    if (beam < 0 || beam >= plan.num_beams) continue;
    if (score > best) best = score;
    if (r.num_next == plan.num_beams) {
      if (is_scorer) continue;  // for `best`, where the candidates are not sorted
      break;
    }
    const bool ends = at_end || slot.is_end_token(p.tokens.at(r.request, i)) ||
                      (p.stopped.data != nullptr && p.stopped.at(r.request, i));
    if (!ends) {
      decisions[i] = kDecisionContinued | static_cast<int32_t>(r.num_next) << kDecisionBits;
      r.go_on(i, score);
    } else if (i >= plan.num_beams) {
      decisions[i] = kDecisionEndTokenTooLow;
    } else {
      const float bonus = p.bonus.data == nullptr ? 0.0f : p.bonus.at(r.request, beam);
      const int64_t place =
          was_done ? kNoPlace : slot.add_hypothesis(slot.normalised(score, by, bonus));
      if (place == kNoPlace) {
        decisions[i] = kDecisionNotBetter;
        continue;
      }
      decisions[i] = kDecisionClosed | static_cast<int32_t>(place) << kDecisionBits;
      plan.sources[place] = static_cast<int32_t>(i);
      plan.closes = true;
      state.hypothesis_lengths[plan.slot * state.hypotheses + place] =
          plan.length + (is_scorer ? 0 : 1);
    }
  }
  if (is_scorer && r.num_next < plan.num_beams) {
    state.status[plan.slot] |= kBeamStatusContinuations;
    state.done[plan.slot] = 1;
    return false;
  }
  if (!is_scorer) {
    // Where too few go on, those that have stopped do, far below.
    for (int64_t i = 0; i < p.num_candidates && r.num_next < plan.num_beams; ++i) {
      const int32_t decision = decisions[i] & kDecisionMask;
      if (decision < kDecisionClosed) continue;
      if (decision != kDecisionClosed) {
        decisions[i] = kDecisionStopped | static_cast<int32_t>(r.num_next) << kDecisionBits;
      }
      const double score = static_cast<double>(p.scores.at(r.request, i)) + kNeverScore;
      r.go_on(i, static_cast<float>(score));
    }
    while (r.num_next < plan.num_beams) {
      const int64_t beam = r.num_next;
      r.add_next(-HUGE_VALF, slot.pad_token, beam, 0.0f, r.parent_first + beam);
    }
    best = p.next_scores[plan.row];
  }
  if (at_end || slot.is_done(best, by)) state.done[plan.slot] = 1;
  return true;
}

}  // namespace beam_step_detail

// plan: output, with memory for its pointers.
LMD_HOST_DEVICE void plan_beam_step(const BeamStepParams& p, int64_t request, BeamStepPlan& plan) {
  const BeamSearchState& state = p.state;
  const auto rows = p.rows_of(request);
  beam_step_detail::Request r{p, plan, request, 0, 0};
  r.parent_first = p.parents.data != nullptr   ? beam_step_detail::row_at(p.parents, request)
                   : p.offsets.data != nullptr ? beam_step_detail::row_at(p.offsets, request)
                                               : rows.begin;
  int32_t* const decisions = p.decisions + request * p.num_candidates;
  for (int64_t i = 0; i < p.num_candidates; ++i) decisions[i] = 0;
  plan.row = rows.begin;
  plan.num_beams = 0;
  plan.closes = false;
  plan.advances = false;
  plan.slot = p.slots.data == nullptr ? request : p.slots.at(request, 0);
  int64_t pad_token = 0;
  if (plan.slot < 0 || plan.slot >= state.slots) {
    plan.slot = kNoPlace;
  } else {
    BeamSearchSlot slot(state, p.parameters, plan.slot, p.dialect_of(request));
    pad_token = slot.pad_token;
    slot.num_beams = clamped(slot.num_beams, 0, rows.end - rows.begin);
    plan.num_beams = slot.num_beams;
    plan.length = p.sequences.is_given ? p.sequences.length
                                       : clamped(state.lengths[plan.slot], 0, state.capacity);
    const bool is_kept = !p.sequences.is_given;
    uint8_t failed = p.status.data == nullptr ? 0 : p.status.at(request, 0);
    const bool is_full = is_kept && plan.length == state.capacity;
    uint8_t& done = state.done[plan.slot];
    if (is_full && done == 0) failed |= kBeamStatusCapacity;
    if (failed != 0 && done == 0) {
      state.status[plan.slot] |= failed;
      done = 1;
    }
    const bool was_done = done != 0;
    const bool is_scorer = slot.dialect == BeamDialect::kScorer;
    for (int64_t place = 0; place < state.hypotheses; ++place) plan.sources[place] = kNoSource;
    const bool in_lockstep = !is_scorer && failed == 0 && state.status[plan.slot] == 0;
    if (plan.num_beams > 0 && (in_lockstep || !was_done)) {
      if (!beam_step_detail::decide(r, slot, decisions)) r.num_next = 0;
    }
    if (r.num_next == 0) {  // ended before, or just now by a failure
      while (r.num_next < plan.num_beams) {
        const int64_t beam = r.num_next;
        r.add_next(0.0f, pad_token, beam, 0.0f, is_scorer ? 0 : r.own_row(beam));
      }
    }
    if (is_kept) {
      for (int64_t beam = 0; beam < plan.num_beams; ++beam) {
        state.scores[plan.slot * state.beams + beam] = p.next_scores[plan.row + beam];
      }
      // A search that was done stays where its sequences are full.
      if (!is_full) {
        plan.advances = true;
        state.lengths[plan.slot] = plan.length + 1;
      }
    }
  }
  // Unused rows of the request belong to no search.
  for (int64_t row = plan.row + plan.num_beams; row < rows.end; ++row) {
    p.next_scores[row] = -HUGE_VALF;
    p.next_tokens[row] = pad_token;
    p.next_parents[row] = r.own_row(row - plan.row);
  }
}

// The sequences of the hypotheses that the plan has closed.
LMD_HOST_DEVICE void close_hypotheses(const BeamStepParams& p, int64_t request,
                                      const BeamStepPlan& plan, Columns columns) {
  NewHypothesis closed;
  closed.slot = plan.slot;
  closed.length = plan.length;
  closed.has_end = true;
  closed.keeps_end_token = p.dialect_of(request) != BeamDialect::kScorer;
  for (int64_t place = 0; place < p.state.hypotheses; ++place) {
    const int64_t source = plan.sources[place];
    if (source == kNoSource) continue;
    closed.place = place;
    closed.beam = p.beams.at(request, source);
    closed.end_token = p.tokens.at(request, source);
    closed.end_log_prob = p.log_probs.data == nullptr ? 0.0f : p.log_probs.at(request, source);
    copy_hypothesis(p.state, p.sequences, request, closed, columns);
  }
}

}  // namespace lmdecode::beam
