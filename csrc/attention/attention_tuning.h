// Tuning numbers of the attention kernels. kStepKeys, kSplitKeys and kTileHeads decide in which
// order a row is summed, so they are fixed: a result must not depend on what else is in the call.
// The others change speed alone.
#pragma once

#include <cstdint>

namespace lmdecode::attention::tuning {

// Keys that a row takes between two looks at its maximum; steps begin at multiples of it.
constexpr int64_t kStepKeys = 256;
// Keys of a part of a cache, in decoding; parts begin at multiples of it.
constexpr int64_t kSplitKeys = 512;
// Query heads of a KV head from which a step multiplies by tiles of the matrix units.
constexpr int64_t kTileHeads = 5;
// Rows (tokens times the query heads of a KV head) that share one packing of keys and values.
constexpr int64_t kTileRows = 384;
// Several threads take smaller tiles, down to this many rows, if there are too few tiles.
constexpr int64_t kMinTileRows = 96;
constexpr int64_t kTilesOfAThread = 8;
// By the matrix units packing a key takes some 75 cycles, as long as 90 rows take. So up to
// kMatrixPackingRows rows share it. With threads a tile has kMatrixMinRows, if each thread then has
// one. What is packed at a time stays in half of a core's second cache.
constexpr int64_t kMatrixPackingRows = 2048;
constexpr int64_t kMatrixMinRows = 512;
constexpr int64_t kMatrixSpanBytes = 1 << 20;

// Cost of one row, key and element of a head, to divide work among threads.
constexpr double kNanosecondsPerProduct = 0.02;
// Cost of merging a row, beside its elements.
constexpr double kMergeRowNanoseconds = 40.0;
// Cost of reading one element of a key or value in decoding.
constexpr double kNanosecondsPerElement = 0.1;

}  // namespace lmdecode::attention::tuning
