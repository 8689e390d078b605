// How top_k_top_p_sample is laid out on a device: pure arithmetic, no CUDA call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sampling/sampling_cuda_tuning.h"

namespace lmdecode::sampling {

// Properties of a device that the plan depends on.
struct SamplingDevice {
  int multiprocessors = 1;
  int64_t shared_bytes_per_block = 48 * 1024;  // the most that a block can ask for
  int64_t shared_bytes_per_multiprocessor = 48 * 1024;
  int max_cluster_size = 1;  // 1: no clusters
};

// One cluster of `cluster_size` blocks takes one row at a time; block r of it the tokens
// [r * slice, (r + 1) * slice).
struct SamplingLaunchPlan {
  int cluster_size = 1;
  int threads = cuda_tuning::kMinThreads;  // of a block: 128, 256, 512
  int64_t clusters = 1;                    // of the grid; rows beyond go round
  int64_t slice = 1;                       // tokens of a block, at least ceil(vocab / cluster_size)
  int64_t cached = 0;  // of these, how many stay in shared memory; the rest is read again
  int rank_chunk = cuda_tuning::kRankChunk;    // a power of two, <= kRankChunk
  int list_room = cuda_tuning::kListedLogits;  // <= kListedLogits
  size_t shared_bytes = 0;
};

// Room for `cached` elements, and for aligning the first like its address.
inline size_t sampling_cache_bytes(int64_t cached, int element_bytes) {
  return cached == 0 ? 0 : (static_cast<size_t>(cached) * element_bytes + 15) / 16 * 16 + 16;
}

// Fewer blocks a row leave less to exchange, more blocks a row hold more of it in shared memory
// and fill the device where the batch is small. fixed_bytes: shared memory besides the row's.
inline SamplingLaunchPlan plan_sampling_launch(int64_t batch, int64_t vocab, int element_bytes,
                                               size_t fixed_bytes, const SamplingDevice& device) {
  using namespace cuda_tuning;
  const int64_t max_grid = (int64_t{1} << 31) - 1;
  const auto slice_of = [&](int64_t blocks) {
    return ((vocab + blocks - 1) / blocks + 15) / 16 * 16;  // slices begin equally aligned
  };
  const auto room = [&](int64_t bytes) {
    const int64_t left = bytes - static_cast<int64_t>(fixed_bytes) - 16 - 15;
    return left > 0 ? left / element_bytes : 0;
  };
  const int64_t whole = device.shared_bytes_per_block;
  int64_t shared =
      device.shared_bytes_per_multiprocessor / kBlocksPerMultiprocessor - kReservedSharedBytes;
  if (shared > whole) shared = whole;

  const int max_cluster =
      device.max_cluster_size < kMaxClusterSize ? device.max_cluster_size : kMaxClusterSize;
  int blocks = 1;
  while (2 * blocks <= max_cluster && slice_of(blocks) > room(shared)) blocks *= 2;
  while (2 * blocks <= max_cluster && batch * blocks * 2 <= device.multiprocessors &&
         slice_of(2 * blocks) >= kMinSlice) {
    blocks *= 2;
  }
  if (slice_of(blocks) > room(shared)) shared = whole;

  SamplingLaunchPlan plan;
  plan.cluster_size = blocks;
  plan.slice = slice_of(blocks);
  plan.cached = plan.slice < room(shared) ? plan.slice : room(shared);
  // A block that has a multiprocessor to itself gets more threads.
  const int max_threads = batch * blocks > device.multiprocessors
                              ? kMaxThreads / kBlocksPerMultiprocessor
                              : kMaxThreads;
  while (plan.threads < max_threads && plan.threads * kLogitsPerThread < plan.slice) {
    plan.threads *= 2;
  }
  plan.clusters = batch < max_grid / blocks ? batch : max_grid / blocks;
  plan.shared_bytes = fixed_bytes + sampling_cache_bytes(plan.cached, element_bytes);
  return plan;
}

}  // namespace lmdecode::sampling
