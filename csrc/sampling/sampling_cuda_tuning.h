// Tuning numbers of the CUDA sampling kernel: they change speed, never a result.
#pragma once

#include <cstdint>

namespace lmdecode::sampling::cuda_tuning {

// Bits of a digit of the radix descents; a histogram has 2^kDigitBits bins.
constexpr int kDigitBits = 11;

// Threads of a block by the logits that it holds: powers of two, at least one warp. The kernel uses
// 128 registers, so a multiprocessor has room for kMaxThreads in all, in one block or in several.
constexpr int kMaxThreads = 512;
constexpr int64_t kLogitsPerThread = 16;
constexpr int kMinThreads = 128;

// Blocks of a cluster, at most.
constexpr int kMaxClusterSize = 8;
// A row is not split, only to fill the device, into slices shorter than this.
constexpr int64_t kMinSlice = 4096;

// Blocks to fit on one multiprocessor: while one waits at a barrier the other computes.
constexpr int kBlocksPerMultiprocessor = 2;
// Shared memory that the driver takes for itself in each block.
constexpr int kReservedSharedBytes = 1024;

// Blocks of a Sampler's step, each with scratch memory for a row; a multiprocessor has room for one
// of kMaxThreads. Rows beyond go round.
constexpr int64_t kMaxSamplerBlocks = 256;

// Kept tokens that are sorted at a time where noise goes by rank; a power of two.
constexpr int kRankChunk = 2048;

// Logits that a block lists of its slice, where the k largest of a row are looked for.
constexpr int kListedLogits = 1024;

// Loads of 16 bytes that a thread has under way while it reads a row.
constexpr int kLoadsInFlight = 4;

}  // namespace lmdecode::sampling::cuda_tuning
