// Numbers that decide how the work of a decoding step is cut into tasks; what it computes does not
// depend on them. Rough estimates, not measured: right within a factor of a few is enough, as they
// only keep small work on one thread.
#pragma once

#include <cstdint>

namespace lmdecode::decoder::tuning {

// Of attention: for each element of a key or value that a row reads.
constexpr double kNanosecondsPerElement = 0.06;

// Of a row that is copied, for each element.
constexpr double kNanosecondsPerCopy = 0.3;

// Of an angle of a rotary embedding: its sine and its cosine.
constexpr double kNanosecondsPerAngle = 40.0;

// Of a logit that is scaled or capped.
constexpr double kNanosecondsPerLogit = 0.5;

// Of a feature that a convolution over a few tokens sees.
constexpr double kNanosecondsPerConvolved = 0.5;

// Of an element of the delta rule's or Mamba-2's state that a token changes.
constexpr double kNanosecondsPerDelta = 0.06;

// Of a head's step in time of Mamba-2: a logarithm and two exponentials.
constexpr double kNanosecondsPerStep = 60.0;

// Up to so many rows the two products of a gated layer read their weights one after the other, as
// memory is fastest. With more, their outputs meet in the caches.
constexpr int64_t kPairedRows = 32;

// Positions of memories that are read at a time: what they give stays in the processor's cache.
constexpr int64_t kReadMemoryRows = 256;

}  // namespace lmdecode::decoder::tuning
