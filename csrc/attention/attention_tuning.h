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
// With several threads tiles are smaller where there would be too few of them.
constexpr int64_t kMinTileRows = 96;
constexpr int64_t kTilesOfAThread = 8;

// Of one row, one key and one element of a head, by which work is dealt out.
constexpr double kNanosecondsPerProduct = 0.02;
// Of a row that is merged, beside its elements.
constexpr double kMergeRowNanoseconds = 40.0;
// Of one element of a key or value that is read in decoding.
constexpr double kNanosecondsPerElement = 0.1;

}  // namespace lmdecode::attention::tuning
