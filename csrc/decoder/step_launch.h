// How the kernels of a decoder's step are laid out on a device: pure arithmetic, no CUDA call.
#pragma once

#include <cstddef>

#include "decoder/decoder_step_cuda.h"

namespace lmdecode::decoder {

namespace step_cuda_tuning {

// These change speed, and the order of additions.
constexpr int kThreads = 128;
constexpr int kBlocksPerMultiprocessor = 8;
// Rows of a request that read its keys and values together.
constexpr int kCrossRows = 4;

}  // namespace step_cuda_tuning

// In shared memory, before what depends on the sizes.
struct StepStorage {
  float reduced[32];  // one a warp
  float partial[step_cuda_tuning::kThreads * step_cuda_tuning::kCrossRows];
};

// Storage, query [padded head] and scores [capacity].
inline int64_t self_attention_shared_bytes(const StepSelfAttentionParams& p) {
  return static_cast<int64_t>(sizeof(StepStorage)) +
         (p.shape.padded_head() + p.capacity) * static_cast<int64_t>(sizeof(float));
}

// Storage, queries [kCrossRows, padded head] and scores [kCrossRows, source].
inline int64_t cross_attention_shared_bytes(const StepCrossAttentionParams& p) {
  return static_cast<int64_t>(sizeof(StepStorage)) + step_cuda_tuning::kCrossRows *
                                                         (p.shape.padded_head() + p.source) *
                                                         static_cast<int64_t>(sizeof(float));
}

// Groups of rows that a request has.
LMD_HOST_DEVICE int64_t cross_groups(const StepCrossAttentionParams& p) {
  constexpr int64_t kRows = step_cuda_tuning::kCrossRows;
  return (p.request_rows + kRows - 1) / kRows;
}

// Of a kernel whose threads own elements.
inline int64_t element_blocks(int64_t elements, int multiprocessors) {
  constexpr int64_t kThreads = step_cuda_tuning::kThreads;
  const int64_t blocks = (elements + kThreads - 1) / kThreads;
  const int64_t most =
      static_cast<int64_t>(multiprocessors) * step_cuda_tuning::kBlocksPerMultiprocessor;
  return blocks < most ? blocks : most;
}

}  // namespace lmdecode::decoder
