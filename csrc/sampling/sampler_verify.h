// Verifies drafted tokens: which of them the sampler accepts, and the token after them.
#pragma once

#include "sampling/sampler_step.h"
#include "simd/kernel_levels.h"

namespace lmdecode::sampling {

// The logits of step are [batch, drafts + 1, vocab], its bitmask [batch, drafts + 1, words]: row 0
// for the token after the text, row i + 1 for the token after draft i. Its outputs are scratch,
// except for the status, which covers all rows visited.
struct SamplerVerifyParams {
  SamplerStepParams step;
  int64_t drafts = 0;
  int64_t logits_draft_stride = 0, bitmask_draft_stride = 0;

  const int64_t* draft = nullptr;       // [batch, drafts] tokens; no token of the vocabulary: none
  const int64_t* parents = nullptr;     // [batch, drafts] of a tree: -1 the text; null: a chain
  const int64_t* num_draft = nullptr;   // [batch], null: all
  const float* draft_logits = nullptr;  // [batch, drafts, vocab], null: the draft was certain
  // Accept with the probability min(1, p / q) instead of where the sampler draws the same token.
  bool rejection = false;

  int64_t* tokens = nullptr;        // [batch, drafts + 1] accepted ones and the next, then -1
  int64_t* path = nullptr;          // [batch, drafts] the accepted drafts' numbers, then -1
  int64_t* num_accepted = nullptr;  // [batch]
};

void sampler_verify_cpu(const SamplerVerifyParams& params);

// As sampler_step_cuda().
void sampler_verify_cuda(const SamplerVerifyParams& params, void* scratch, void* stream);

}  // namespace lmdecode::sampling

LMD_DECLARE_KERNELS(sampling, void sampler_step_rows(const SamplerStepParams& params, int64_t begin,
                                                     int64_t end, void* workspace);
                    void sampler_verify_rows(const SamplerVerifyParams& params, int64_t begin,
                                             int64_t end, void* workspace);)
