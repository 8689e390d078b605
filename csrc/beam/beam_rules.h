// The rules of one beam search: which hypotheses are kept, and when the search is done. CPU and
// CUDA run the same code. python/lmdecode/reference/beam_rules.py has the rules in Python numbers;
// docs/reference/beam.md is the user's page.
//
// A hypothesis score is f64. It is rounded to f32 after each operation if the system that defines
// the rules computes in f32. A hypothesis of score NaN is not kept.
#pragma once

#include <cmath>
#include <cstdint>

#include "beam/beam_search_state.h"
#include "common/host_device.h"

namespace lmdecode::beam {

// transformers' -1e9: below every hypothesis; also added to the scores of stopped beams.
constexpr double kNeverScore = -1.0e9;
// Score of missing candidates, far below all others. With rules "scorer" these continue, too, as in
// transformers 4.
constexpr float kMissingCandidateScore = -3.0e38f;
constexpr int32_t kNoPlace = -1;
// Far beyond any memory, but sums of a few fit into 64 bits.
constexpr int64_t kMaxLength = int64_t{1} << 60;

LMD_HOST_DEVICE double rounded_to_f32(double value) {
  return static_cast<double>(static_cast<float>(value));
}

LMD_HOST_DEVICE int64_t clamped(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

struct BeamSearchSlot {
  BeamDialect dialect;
  int64_t num_beams, num_hypotheses, prompt_length, max_length, early_stopping, pad_token;
  double length_penalty;
  const int64_t* end_tokens;
  int64_t num_end_tokens;
  double* hypothesis_scores;  // [num_hypotheses]
  int64_t* hypothesis_numbers;
  double* worst_score;

  // Clamps the tensors' values to their sizes: CUDA cannot check them before the launch.
  LMD_HOST_DEVICE BeamSearchSlot(const BeamSearchState& state,
                                 const BeamSearchParameters& parameters, int64_t slot,
                                 BeamDialect slot_dialect)
      : dialect(slot_dialect),
        num_beams(clamped(parameters.num_beams[slot], 1, state.beams)),
        num_hypotheses(clamped(parameters.num_hypotheses[slot], 1, state.hypotheses)),
        prompt_length(clamped(parameters.prompt_lengths[slot], 0, kMaxLength)),
        max_length(clamped(parameters.max_lengths[slot], 0, kMaxLength)),
        early_stopping(parameters.early_stopping[slot]),
        pad_token(parameters.pad_tokens[slot]),
        length_penalty(parameters.length_penalty[slot]),
        end_tokens(parameters.end_tokens + slot * parameters.num_end_tokens),
        num_end_tokens(parameters.num_end_tokens),
        hypothesis_scores(state.hypothesis_scores + slot * state.hypotheses),
        hypothesis_numbers(state.hypothesis_numbers + slot * state.hypotheses),
        worst_score(state.worst_scores + slot) {}

  LMD_HOST_DEVICE bool is_end_token(int64_t token) const {
    if (token < 0) return false;
    for (int64_t i = 0; i < num_end_tokens; ++i) {
      if (end_tokens[i] == token) return true;
    }
    return false;
  }

  // Whether this is the score of an existing candidate or beam. For BeamSearchScorer -inf is a
  // score like any other: masks produce such candidates, which continue if there is no other.
  LMD_HOST_DEVICE bool takes_part(float score) const {
    return dialect == BeamDialect::kScorer ? score == score : score > -HUGE_VALF;
  }

  // The divisor of the scores of hypotheses with this number of generated tokens.
  LMD_HOST_DEVICE double divisor(double length) const {
    const double power = pow(length, length_penalty);
    return dialect == BeamDialect::kScorer ? power : rounded_to_f32(power);
  }

  LMD_HOST_DEVICE double normalised(double score, double by, double bonus) const {
    if (dialect == BeamDialect::kScorer) return score / by + bonus;
    return rounded_to_f32(rounded_to_f32(score / by) + bonus);
  }

  // The place of a hypothesis of this score; kNoPlace if its score is not good enough.
  LMD_HOST_DEVICE int64_t add_hypothesis(double score) const {
    if (score != score) return kNoPlace;
    score += 0.0;  // no -0.0: which of two zeros is the lower one is not to matter
    int64_t taken = 0, free_place = kNoPlace, lowest = kNoPlace, last_number = -1;
    double second_lowest = score;  // of those that would stay, with the new one
    for (int64_t place = 0; place < num_hypotheses; ++place) {
      const int64_t number = hypothesis_numbers[place];
      if (number < 0) {
        if (free_place == kNoPlace) free_place = place;
        continue;
      }
      ++taken;
      if (number > last_number) last_number = number;
      if (lowest == kNoPlace) {
        lowest = place;
        continue;
      }
      int64_t stays = place;
      if (is_evicted_before(place, lowest)) {
        stays = lowest;
        lowest = place;
      }
      if (hypothesis_scores[stays] < second_lowest) second_lowest = hypothesis_scores[stays];
    }
    int64_t place = free_place;
    const double worst = *worst_score;
    if (taken < num_hypotheses) {
      if (dialect == BeamDialect::kGenerate && !(score > kNeverScore)) return kNoPlace;
      *worst_score = worst < score ? worst : score;
    } else {
      if (dialect == BeamDialect::kFairseq || !(score > worst)) return kNoPlace;
      place = lowest;
      *worst_score = second_lowest;
    }
    hypothesis_numbers[place] = last_number + 1;
    hypothesis_scores[place] = score;
    return place;
  }

  LMD_HOST_DEVICE bool has_all_hypotheses() const {
    for (int64_t place = 0; place < num_hypotheses; ++place) {
      if (hypothesis_numbers[place] < 0) return false;
    }
    return true;
  }

  // Whether no running beam can beat the hypotheses. best: the best candidate's score ("scorer"),
  // or the first running beam's; length: generated tokens, including this step's; by:
  // divisor(length).
  LMD_HOST_DEVICE bool is_done(double best, double by) const {
    const bool full = has_all_hypotheses();
    if (dialect == BeamDialect::kFairseq) return full;
    if (early_stopping == kEarlyStoppingTrue && full) return true;
    if (dialect == BeamDialect::kScorer && !full) return false;
    if (early_stopping == kEarlyStoppingNever && length_penalty > 0) {
      const int64_t left = max_length - prompt_length;
      by = divisor(max_length == 0 ? HUGE_VAL : static_cast<double>(left > 0 ? left : 0));
    }
    const double attainable = normalised(best, by, 0.0);
    if (dialect == BeamDialect::kScorer) return *worst_score >= attainable;
    return !(attainable > (full ? *worst_score : kNeverScore));
  }

 private:
  // The lowest score goes; of equal ones the earliest ("scorer"), or the last to come.
  LMD_HOST_DEVICE bool is_evicted_before(int64_t place, int64_t other) const {
    const double score = hypothesis_scores[place], other_score = hypothesis_scores[other];
    if (score < other_score || score > other_score) return score < other_score;
    const bool is_earlier = hypothesis_numbers[place] < hypothesis_numbers[other];
    return (dialect == BeamDialect::kScorer) == is_earlier;
  }
};

}  // namespace lmdecode::beam
