// The rule of rejection for one drafted token (arXiv 2211.17192, 2302.01318): accepted with the
// probability min(1, p / q), else a token of the distribution of (p - q)+ is drawn, so that what
// comes out is distributed as p. Exact, in integers: masses against masses. A kernel header: see
// simd/vec.h.
#pragma once

#include "sampling/drafted_token.h"
#include "sampling/row_passes.h"
#include "sampling/token_choice.h"

namespace lmdecode::LMD_SIMD::sampling {

using namespace lmdecode::sampling;

// Logits that say nothing make the draft certain. The list is scratch.
inline DraftedToken drafted_token(int64_t token, const float* logits, int64_t n, int fraction_bits,
                                  CandidateList* list) {
  DraftedToken d{token, nullptr, {}, 1};
  if (logits == nullptr) return d;
  const RowMax scan = scan_max(logits, n);
  if (!(scan.max > minus_infinity())) return d;
  d.logits = logits;
  d.rule.max = scan.max;
  d.rule.factor = exponent_factor(1.0f);
  d.rule.fraction_bits = fraction_bits;
  d.rule.uniform = scan.max == plus_infinity();
  if (d.rule.uniform) {
    d.mass = static_cast<uint64_t>(count_from(logits, n, scan.max)) << fraction_bits;
    return d;
  }
  list->size = 0;
  d.mass = scan_masses<false>(logits, n, d.rule.max, d.rule.factor, fraction_bits, plus_infinity(),
                              0.0f, list)
               .total;
  return d;
}

// The place in the list, which has masses, of the token that comes next; -1 where the rule leaves
// none, since p and q are the same.
inline int64_t choose_by_rejection(const CandidateList& list, const DraftedToken& drafted,
                                   int64_t seed, int64_t position) {
  const uint64_t all = total_mass(list);
  const auto p = [&](int64_t i) { return static_cast<Wide>(list.mass[i]) * drafted.mass; };
  const auto q = [&](int64_t i) { return static_cast<Wide>(drafted.mass_of(list.token[i])) * all; };
  int64_t best = -1;
  double best_score = 0.0;
  for (int64_t i = 0; i < list.size; ++i) {
    if (list.token[i] == drafted.token && list.mass[i] > 0 &&
        is_accepted(row_word(seed, position, kRejectionBlock), q(i), p(i))) {
      return i;
    }
    if (p(i) <= q(i)) continue;
    const double noise = rejection_noise(seed, position, list.token[i]);
    const double score = to_double(p(i) - q(i)) / noise;
    if (best < 0 || score > best_score) {
      best = i;
      best_score = score;
    }
  }
  return best;
}

}  // namespace lmdecode::LMD_SIMD::sampling
