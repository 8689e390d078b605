// How the kernels of a decoder's step are laid out on a device: pure arithmetic, no CUDA call.
#pragma once

#include <cstddef>

#include "decoder/decoder_step_cuda.h"

namespace lmdecode::decoder {

namespace step_cuda_tuning {

// These change speed, and the order of additions.
constexpr int kThreads = 128;
constexpr int kBlocksPerMultiprocessor = 8;
// Rows of a request that read its keys and values together: a vector of floats has one of each.
constexpr int kCrossRows = 4;
// Lanes that read one position together, 16 bytes each at a time.
constexpr int kPositionLanes = 8;
// Elements of a row that a thread reads at once.
constexpr int kElementsInFlight = 4;
// Keys that these lanes have under way.
constexpr int kKeysOfGroup = 4;

}  // namespace step_cuda_tuning

constexpr int kMostVectorElements = 8;  // of 16 bytes

// In shared memory, before what depends on the sizes.
struct alignas(16) StepStorage {
  float reduced[32];                           // one a warp
  float factor[step_cuda_tuning::kCrossRows];  // of the weights of a row
  // Of a warp: sums of kPositionLanes vectors, of each row.
  float partial[step_cuda_tuning::kThreads / 32][step_cuda_tuning::kPositionLanes *
                                                 kMostVectorElements][step_cuda_tuning::kCrossRows];
};

// Storage, query [padded head], scores [capacity] and the cache rows of the positions [capacity].
inline int64_t self_attention_shared_bytes(const StepSelfAttentionParams& p) {
  return static_cast<int64_t>(sizeof(StepStorage)) +
         (p.shape.padded_head() + p.capacity) * static_cast<int64_t>(sizeof(float)) +
         p.capacity * static_cast<int64_t>(sizeof(int32_t));
}

// Storage, queries [padded head, kCrossRows] and scores [source, kCrossRows].
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
