// Numbers that decide how the work of a decoding step is cut into tasks; what it computes does not
// depend on them. Rough estimates, not measured: right within a factor of a few is enough, as they
// only keep small work on one thread.
#pragma once

#include <cstdint>

namespace lmdecode::decoder::tuning {

// Attention: an element of a key or value that a row reads.
constexpr double kNanosecondsPerElement = 0.06;

// Copying an element.
constexpr double kNanosecondsPerCopy = 0.3;

// Sine and cosine of an angle.
constexpr double kNanosecondsPerAngle = 40.0;

// Scaling or capping a logit.
constexpr double kNanosecondsPerLogit = 0.5;

// A feature of a short convolution.
constexpr double kNanosecondsPerConvolved = 0.5;

// Updating an element of a state of the delta rule or Mamba-2.
constexpr double kNanosecondsPerDelta = 0.06;

// A head's time step in Mamba-2: a logarithm and two exponentials.
constexpr double kNanosecondsPerStep = 60.0;

// Up to this many rows, the two products of a gated layer run one after the other: memory is then
// fastest. With more rows they run in turns, so that their outputs stay in the caches.
constexpr int64_t kPairedRows = 32;

// Positions of memories read at a time, so that their projections stay in the cache.
constexpr int64_t kReadMemoryRows = 256;

}  // namespace lmdecode::decoder::tuning
