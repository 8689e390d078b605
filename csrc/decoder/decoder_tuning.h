// Numbers that decide how the work of a decoding step is cut into tasks; what it computes does not
// depend on them. Rough estimates, not measured: right within a factor of a few is enough, as they
// only keep small work on one thread.
#pragma once

namespace lmdecode::decoder::tuning {

// A task of less work than this costs more to hand out than it saves.
constexpr double kMinTaskNanoseconds = 20000.0;

// Of attention: for each element of a key or value that a row reads.
constexpr double kNanosecondsPerElement = 0.06;

// Of a row that is copied, for each element.
constexpr double kNanosecondsPerCopy = 0.3;

}  // namespace lmdecode::decoder::tuning
