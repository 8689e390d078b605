// The draw by internal noise: takes the kept token with the largest weight / noise, at ties the
// first. A first pass bounds the scores by half of the noise's bits; few tokens need the rest.
#pragma once

#include "sampling/row_cluster.cuh"
#include "sampling/token_weight.cuh"

namespace lmdecode::sampling::cuda_kernels {

struct ScoredToken {
  Word score, token;  // bits of the score, which is not negative; complement of the token

  static __device__ ScoredToken better(const ScoredToken& a, const ScoredToken& b) {
    return a.score > b.score || (a.score == b.score && a.token > b.token) ? a : b;
  }
};

// Long, and of few tokens.
LMD_OUT_OF_LINE __device__ inline ScoredToken exactly_scored(float weight, int64_t seed,
                                                             int64_t position, uint32_t token) {
  return {bits_of(exact_score(weight, seed, position, token)), 0xffffffffu - token};
}

// The token that may score highest among those a thread has seen, and a bound of all others.
struct SeedCandidate {
  float upper = -1.0f, other_upper = -1.0f;
  float weight = 0.0f;
  uint32_t high_word = 0, token = 0;

  __device__ void see(float token_weight, uint32_t word, uint32_t seen) {
    const float bound = upper_score(token_weight, word);
    const bool is_higher = bound > upper;
    const float lower_one = is_higher ? upper : bound;
    other_upper = lower_one > other_upper ? lower_one : other_upper;
    if (!is_higher) return;
    upper = bound;
    weight = token_weight;
    high_word = word;
    token = seen;
  }

  // The order key of what the best token scores at least.
  __device__ uint32_t bound() const {
    return order_key(upper > -1.0f ? lower_score(weight, high_word) : -1.0f);
  }
};

// kept(logit, token) tells the tokens to draw from; mine: this thread's candidate; bound: the
// largest bound() of all threads. Returns the complement of the token; 0 if none passes its bound,
// which happens if all weights and the noise are 0.
template <class Row, class Kept>
__device__ uint32_t draw_by_seed(RowCluster& cluster, const Row& row, Kept kept,
                                 const TokenWeight& weights, int64_t seed, int64_t position,
                                 const SeedCandidate& mine, uint32_t bound) {
  const float lowest = bound > order_key(-1.0f) ? value_of_key(bound) : -1.0f;
  struct Best {
    ScoredToken scored;
    Word has_others;  // a thread has more than one token that may win
  } best{{0, 0}, mine.other_upper > -1.0f && mine.other_upper >= lowest};
  if (mine.upper > -1.0f && mine.upper >= lowest) {
    best.scored = exactly_scored(mine.weight, seed, position, mine.token);
  }
  best = cluster.reduce(best, [](const Best& a, const Best& b) {
    return Best{ScoredToken::better(a.scored, b.scored), a.has_others | b.has_others};
  });
  if (best.has_others == 0) return static_cast<uint32_t>(best.scored.token);
  ScoredToken scored{0, 0};
  row.each([&](float logit, uint32_t token) {
    if (!kept(logit, token)) return;
    const float weight = weights.weight(logit);
    if (!(upper_score(weight, noise_word(seed, position, token, 0)) >= lowest)) return;
    scored = ScoredToken::better(exactly_scored(weight, seed, position, token), scored);
  });
  scored = cluster.reduce(
      scored, [](const ScoredToken& a, const ScoredToken& b) { return ScoredToken::better(a, b); });
  return static_cast<uint32_t>(scored.token);
}

}  // namespace lmdecode::sampling::cuda_kernels
