// Tuning numbers of the attention kernels on a GPU. The sizes of tiles and kSplitKeys decide in
// which order a row is summed, so they are fixed: a result must not depend on what else is in the
// call.
#pragma once

#include <cstdint>

namespace lmdecode::attention::cuda_tuning {

constexpr int kMergeThreads = 128;

// Tiles of sliding_window_attention on tensor cores, by the head size they are compiled for: rows
// are 16 * kRowTiles * kWarps.
constexpr int kWarps = 4;
constexpr int kKeys = 64;
constexpr int row_tiles(int size) { return size <= 128 ? 2 : 1; }  // as registers and 99 KB allow

// sliding_window_decode: keys of a part; keys of a step, 16 a warp; steps in flight.
constexpr int kSplitKeys = 512;
constexpr int decode_warps(int size) { return size <= 128 ? 4 : 2; }
constexpr int kDecodeStages = 2;
// Blocks of a multiprocessor: as few as leave the registers that the main loop needs.
constexpr int decode_blocks(int size) { return size <= 128 ? 3 : 4; }
// Adding the parts of a row: columns of a block; parts it holds the weights of; loads in flight.
constexpr int kCombineThreads = 128;
constexpr int kCombineParts = 128;
constexpr int kCombineLoads = 16;

// Without tensor cores: warps of a block, and rows of a warp.
constexpr int kPlainWarps = 8;
constexpr int kPlainRows = 4;
constexpr int kPlainDecodeRows = 1;

}  // namespace lmdecode::attention::cuda_tuning
