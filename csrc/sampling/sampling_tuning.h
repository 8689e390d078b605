// Tuning numbers of the sampling kernels: they change speed, never a result.
#pragma once

#include <cstdint>

namespace lmdecode::sampling_tuning {

// Elements read to guess a first threshold, in kSampleSegments runs spread over the row.
constexpr int kSampleSize = 1024;
constexpr int kSampleSegments = 32;
// Rows shorter than this are not sampled: every element is a candidate.
constexpr int64_t kMinSampledVocab = 4096;
// Bisection steps for a quantile of the sample: an approximate one will do.
constexpr int kSampleSteps = 12;

// The candidate list of top-k is cut back to k whenever it holds kShrinkFactor * k + kShrinkSlack.
constexpr int64_t kShrinkFactor = 4;
constexpr int64_t kShrinkSlack = 4096;

// top-p: the share of the tail, 1 - p, that may be left out of the candidates by estimate.
constexpr float kTailShare = 0.5f;
// Standard deviations between the estimated and the assumed position of the cut.
constexpr float kSampleSigmas = 4.0f;
// Fewer sampled elements above the upper bound than this: the bound is not used.
constexpr int kMinSampledAbove = 48;
// Lists longer than this are narrowed by compression while a cut is searched, after kNarrowSteps bisections.
constexpr int64_t kNarrowSize = 512;
constexpr int kNarrowSteps = 3;

// Kept tokens beyond vocab / kDenseWriteShare are written by a pass over the row, fewer by fill and scatter.
constexpr int64_t kDenseWriteShare = 16;

// Logits that make a parallel task worth its start.
constexpr int64_t kMinTaskSize = 32768;

}  // namespace lmdecode::sampling_tuning
