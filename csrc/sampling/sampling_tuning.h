// Tuning numbers of the sampling kernels: they change speed, never a result.
#pragma once

#include <cstdint>

namespace lmdecode::sampling::tuning {

// Elements read to guess thresholds, in runs of kSampleRun spread over the row: for top-k, and at
// most for top-p, which samples one element in kMassSampleShare.
constexpr int kSampleSize = 1024;
constexpr int kMaxMassSampleSize = 4096;
constexpr int kMassSampleShare = 16;
constexpr int kSampleRun = 16;
// Rows shorter than this are not sampled: every element is a candidate.
constexpr int64_t kMinSampledVocab = 4096;
// Bisection steps for a quantile of the sample: an approximate one will do.
constexpr int kSampleSteps = 12;

// The candidate list of top-k is cut back to k whenever it holds kShrinkFactor * k + kShrinkSlack.
constexpr int64_t kShrinkFactor = 4;
constexpr int64_t kShrinkSlack = 4096;

// top-p: the share of the tail, 1 - p, that may be left out of the candidates by estimate.
constexpr float kTailShare = 0.85f;
// Standard deviations between the estimated and the assumed position of the cut.
constexpr float kSampleSigmas = 3.0f;
// The lower bound has at least this many sampled elements above it: fewer say little about a heavy
// tail.
constexpr int kMinSampledCandidates = 48;
// A lower bound that was too high is lowered by this many powers of two of the weight, and again.
constexpr float kRetryExponents = 4.0f;
constexpr int kRetries = 3;
// Fewer sampled elements above the upper bound than this: the bound is not used.
constexpr int kMinSampledAbove = 128;
// Bisection steps over kQuantileRange powers of two below the maximum.
constexpr int kQuantileSteps = 13;
constexpr float kQuantileRange = 48.0f;

// Lists longer than this are narrowed by histograms while a cut of masses is searched.
constexpr int64_t kNarrowSize = 512;

// Kept tokens beyond vocab / kDenseNoiseShare draw their noise in a pass over the row, fewer from a
// list.
constexpr int64_t kDenseNoiseShare = 8;

// Estimated time of a row.
constexpr double kTopKNanosecondsPerLogit = 0.1;
constexpr double kOtherNanosecondsPerLogit = 0.5;
constexpr double kRowNanoseconds = 2000.0;

}  // namespace lmdecode::sampling::tuning
