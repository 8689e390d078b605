// Launches a kernel that gives each request a block; no allocation and no wait, so that a CUDA
// graph can capture it. For .cu files.
#pragma once

#include <sstream>

#include "beam/beam_search_state.h"
#include "beam/beam_tuning.h"
#include "common/cuda_launch.h"

namespace lmdecode::beam {

// Dynamic shared memory that every device gives a block unasked.
constexpr size_t kSharedBytesUnasked = 48 * 1024;

// The content of a step's shared memory, for an error.
constexpr const char* kStepTakes = "(24 bytes a beam, 4 a hypothesis)";

inline void check_shared_bytes(const char* op, size_t shared_bytes, const char* takes,
                               const BeamSearchState& state) {
  if (shared_bytes <= kSharedBytesUnasked) return;
  std::ostringstream message;
  message << op << ": state has " << state.beams << " beams and " << state.hypotheses
          << " hypotheses; expected no more " << takes << " than fit " << kSharedBytesUnasked
          << " bytes on a GPU, here " << shared_bytes;
  throw std::invalid_argument(message.str());
}

// Launches kernel(params) with shared_bytes of shared memory; takes: their content, for an error.
template <class Params>
void launch_requests(const char* op, void (*kernel)(Params), int64_t requests, size_t shared_bytes,
                     const char* takes, const Params& params, void* stream) {
  check_shared_bytes(op, shared_bytes, takes, params.state);
  if (requests == 0) return;
  launch_kernel(op, kernel, {requests, tuning::kStepThreads, shared_bytes}, stream, params);
}

}  // namespace lmdecode::beam
