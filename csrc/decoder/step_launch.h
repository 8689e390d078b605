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
// Blocks that share the positions of a row, and how many a cache has for each of them.
constexpr int kMostParts = 8;
constexpr int64_t kPositionsOfPart = 256;
// What a block takes at least, and in multiples of what.
constexpr int64_t kLeastPart = 128;
constexpr int64_t kPartStep = 64;

}  // namespace step_cuda_tuning

constexpr int kMostVectorElements = 8;  // of 16 bytes

// Blocks of the cluster that a row and head get in a cache of so many positions. It does not depend
// on the rows of a call, and so neither do their results.
inline int parts_of_cache(int64_t positions, int most_blocks) {
  using namespace step_cuda_tuning;
  int parts = 1;
  while (2 * parts <= kMostParts && 2 * parts <= most_blocks &&
         parts * kPositionsOfPart < positions) {
    parts *= 2;
  }
  return parts;
}

// Of `count` positions, those that each of so many blocks takes; the last ones may have none.
LMD_HOST_DEVICE constexpr int64_t part_size(int64_t count, int64_t blocks) {
  using namespace step_cuda_tuning;
  if (blocks == 1) return count;
  const int64_t steps = (count + blocks * kPartStep - 1) / (blocks * kPartStep);
  const int64_t size = steps * kPartStep < kLeastPart ? kLeastPart : steps * kPartStep;
  return size < count ? size : count;
}

// In shared memory, before what depends on the sizes.
struct alignas(16) StepStorage {
  float reduced[32];  // one a warp
  // Of a row's scores: the largest one, and the sum of the weights that it leads to.
  float top[step_cuda_tuning::kCrossRows];
  float sum[step_cuda_tuning::kCrossRows];
  // Of a warp: sums of kPositionLanes vectors, of each row.
  float partial[step_cuda_tuning::kThreads / 32][step_cuda_tuning::kPositionLanes *
                                                 kMostVectorElements][step_cuda_tuning::kCrossRows];
};

// Of a block of `parts`: storage, query [padded head], scores and cache rows of its positions.
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
