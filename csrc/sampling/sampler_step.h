// A step of a Sampler: rows of logits to tokens, by the parameters and the state of each row.
// docs/reference/sampler.md is the user's page.
//
// A row is edited (biases, penalties, rules, bitmask), then filtered by the stages of its dialect,
// each on what the one before left; of the kept tokens one is drawn as top_k_top_p_sample draws.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/half.h"
#include "sampling/sampler_dialect.h"
#include "sampling/sampler_state.h"

namespace lmdecode::sampling {

constexpr uint8_t kStatusNoSequence = 8;  // the row of the sampler was removed: index -1
// On a GPU, where nobody looks at the rows before: no row of these sizes, no room for its text, or
// a number of drafts out of range. Index -1, and the row is as it was.
constexpr uint8_t kStatusRefused = 16;

struct SamplerStepParams {
  int64_t batch = 0;
  int64_t vocab = 0;
  char* state = nullptr;  // [batch] rows of layout.size bytes
  SamplerLayout layout{};

  const void* logits = nullptr;  // [batch, vocab] of dtype, strides in elements
  DType dtype = DType::kFloat32;
  int64_t logits_row_stride = 0;
  int64_t logits_vocab_stride = 1;

  const int32_t* bitmask = nullptr;  // [batch, ceil(vocab / 32)], rows contiguous, or null
  int64_t bitmask_row_stride = 0;

  bool accept = true;         // the chosen tokens go on with the sequences
  bool raw_log_probs = true;  // log-probabilities of the unedited logits, not of the kept tokens
  int64_t num_logprobs = -1;  // < 0: none; the chosen token's, and as many best ones

  // Outputs; optional ones are null if not wanted.
  int64_t* index = nullptr;         // [batch]
  int64_t* rank = nullptr;          // [batch], null where num_logprobs < 0
  int64_t* top_ids = nullptr;       // [batch, num_logprobs] likewise, -1 where there are no more
  float* logprob = nullptr;         // [batch] likewise
  float* top_logprobs = nullptr;    // [batch, num_logprobs] likewise
  int32_t* kept_count = nullptr;    // [batch]
  int32_t* stage_counts = nullptr;  // [batch, kSamplerStages] or null; -1 where a stage is off
  uint8_t* status = nullptr;        // [batch]
  float* kept_logits = nullptr;     // [batch, vocab] or null
  int64_t* kept_ids = nullptr;      // [batch, vocab] or null: the first kept_count of a row
  float* kept_logprobs = nullptr;   // [batch, vocab] or null, likewise
};

// Runs on the calling thread and torch's worker threads; the arguments have been checked, and there
// is room where tokens are accepted.
void sampler_step_cpu(const SamplerStepParams& params);

// The most log-probabilities of a step on a GPU: a block sorts them in its shared memory.
constexpr int64_t kMostCudaLogProbs = 2048;

// stream is a cudaStream_t; launches only. scratch: sampler_cuda_scratch_bytes() of global memory,
// aligned to 64.
void sampler_step_cuda(const SamplerStepParams& params, void* scratch, void* stream);
int64_t sampler_cuda_scratch_bytes(const SamplerStepParams& params);

}  // namespace lmdecode::sampling
