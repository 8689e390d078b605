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
// Lanes that read one position together, 16 bytes each.
constexpr int kPositionLanes = 8;
// Elements of a row that a thread reads at once.
constexpr int kElementsInFlight = 4;
// Keys in flight for these lanes.
constexpr int kKeysOfGroup = 4;
// Most blocks that share the positions of a row, and the positions that justify one.
constexpr int kMostParts = 8;
constexpr int64_t kPositionsOfPart = 256;
// Fewest positions of a block, and their granularity.
constexpr int64_t kLeastPart = 128;
constexpr int64_t kPartStep = 64;

}  // namespace step_cuda_tuning

constexpr int kMostVectorElements = 8;  // of 16 bytes

// Blocks in the cluster of a row and head, for a cache of this many positions. Independent of the
// call's rows, and so are their results.
inline int parts_of_cache(int64_t positions, int most_blocks) {
  using namespace step_cuda_tuning;
  int parts = 1;
  while (2 * parts <= kMostParts && 2 * parts <= most_blocks &&
         parts * kPositionsOfPart < positions) {
    parts *= 2;
  }
  return parts;
}

// Positions of each of `blocks` blocks that share `count`; the last ones may have none.
LMD_HOST_DEVICE constexpr int64_t part_size(int64_t count, int64_t blocks) {
  using namespace step_cuda_tuning;
  if (blocks == 1) return count;
  const int64_t steps = (count + blocks * kPartStep - 1) / (blocks * kPartStep);
  const int64_t size = steps * kPartStep < kLeastPart ? kLeastPart : steps * kPartStep;
  return size < count ? size : count;
}

// The fixed part of shared memory, before the parts that depend on sizes.
struct alignas(16) StepStorage {
  float reduced[32];  // one a warp
  // For each row: its largest score, and the sum of its weights.
  float top[step_cuda_tuning::kCrossRows];
  float sum[step_cuda_tuning::kCrossRows];
  // For each warp: sums of kPositionLanes vectors of each row.
  float partial[step_cuda_tuning::kThreads / 32][step_cuda_tuning::kPositionLanes *
                                                 kMostVectorElements][step_cuda_tuning::kCrossRows];
};

// Storage, query [padded head], and the scores and cache rows of a block's positions.
inline int64_t self_attention_shared_bytes(const StepSelfAttentionParams& p, int parts) {
  return static_cast<int64_t>(sizeof(StepStorage)) +
         p.shape.padded_head() * static_cast<int64_t>(sizeof(float)) +
         part_size(p.capacity, parts) * static_cast<int64_t>(sizeof(float) + sizeof(int32_t));
}

// Storage, queries [padded head, kCrossRows] and scores [positions, kCrossRows].
inline int64_t cross_attention_shared_bytes(const StepCrossAttentionParams& p, int parts) {
  return static_cast<int64_t>(sizeof(StepStorage)) +
         step_cuda_tuning::kCrossRows * (p.shape.padded_head() + part_size(p.source, parts)) *
             static_cast<int64_t>(sizeof(float));
}

// Groups of rows in a request.
LMD_HOST_DEVICE int64_t cross_groups(const StepCrossAttentionParams& p) {
  constexpr int64_t kRows = step_cuda_tuning::kCrossRows;
  return (p.request_rows + kRows - 1) / kRows;
}

// Blocks of a kernel with a thread for each element.
inline int64_t element_blocks(int64_t elements, int multiprocessors) {
  constexpr int64_t kThreads = step_cuda_tuning::kThreads;
  const int64_t blocks = (elements + kThreads - 1) / kThreads;
  const int64_t most =
      static_cast<int64_t>(multiprocessors) * step_cuda_tuning::kBlocksPerMultiprocessor;
  return blocks < most ? blocks : most;
}

}  // namespace lmdecode::decoder
