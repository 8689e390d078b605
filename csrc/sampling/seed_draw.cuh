// The draw by internal noise: of the kept tokens that with the largest weight / noise, at ties the
// first.
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

// kept(logit, token) tells the tokens to draw from. bound: the order key of the best lower_score()
// of these. The complement of the token; 0 where nothing passes its bound, since all weights are 0
// and so is the noise.
template <class Row, class Kept>
__device__ uint32_t draw_by_seed(RowCluster& cluster, const Row& row, Kept kept,
                                 const TokenWeight& weights, int64_t seed, int64_t position,
                                 uint32_t bound) {
  const float lowest = bound > order_key(-1.0f) ? value_of_key(bound) : -1.0f;
  ScoredToken best{0, 0};
  row.each([&](float logit, uint32_t token) {
    if (!kept(logit, token)) return;
    const float weight = weights.weight(logit);
    if (!(upper_score(weight, noise_word(seed, position, token, 0)) >= lowest)) return;
    const double score = exact_score(weight, seed, position, token);
    best = ScoredToken::better(ScoredToken{bits_of(score), 0xffffffffu - token}, best);
  });
  best = cluster.reduce(
      best, [](const ScoredToken& a, const ScoredToken& b) { return ScoredToken::better(a, b); });
  return static_cast<uint32_t>(best.token);
}

}  // namespace lmdecode::sampling::cuda_kernels
