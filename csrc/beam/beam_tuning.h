// Tuning numbers of the beam kernels: they change speed, never a result.
#pragma once

#include <cstdint>

namespace lmdecode::beam::tuning {

// A row's threshold comes from the largest logits of groups of its tokens: this many groups for
// each candidate wanted, and at least kMinGroups.
constexpr int64_t kGroupsPerCandidate = 16;
constexpr int64_t kMinGroups = 256;
// The search for the threshold ends where it leaves at most kSurplusShare more groups than asked.
constexpr int64_t kSurplusShare = 4;
// With processors: more groups for each edited token. In rows with fewer tokens than this for each
// edited one, all log-probabilities are written instead.
constexpr int64_t kGroupsPerEdit = 2;
constexpr int64_t kTokensPerEdit = 8;
// Requests with at most this many candidates are sorted by insertion.
constexpr int64_t kInsertionSize = 64;

// Estimated times.
constexpr double kNanosecondsPerLogit = 0.17;
constexpr double kRowNanoseconds = 500.0;
constexpr double kNanosecondsPerCandidate = 4.0;
constexpr double kNanosecondsPerEdit = 15.0;
constexpr double kStepNanoseconds = 150.0;  // of a request in beam_step and beam_finalize
constexpr double kStepNanosecondsPerCandidate = 5.0;
constexpr double kStepNanosecondsPerToken = 0.5;  // of its sequences

// Up to this many candidates of a request, a GPU ranks each among all.
constexpr int64_t kRankedCandidates = 256;
// Threads of the block that merges a request.
constexpr int kMergeThreads = 256;
// Threads of the block of a request in beam_step and beam_finalize.
constexpr int kStepThreads = 128;

}  // namespace lmdecode::beam::tuning
