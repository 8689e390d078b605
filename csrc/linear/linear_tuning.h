// Tuning numbers of the packed matmul. They change speed, never a result.
#pragma once

#include <cstdint>

namespace lmdecode::linear::tuning {

// Rows that pass over a panel together: with the part of a panel that a chain takes, 128 KB, and
// the part fetched ahead, their inputs stay in 1 MB of L2.
constexpr int64_t kRowBlock = 144;

// Parts of the rows that threads prepare for products, and rows that make a part.
constexpr int64_t kPreparedParts = 16, kPreparedRows = 8;

// Where weights have groups, rows of a tile, whose sums are kept in registers, and elements of
// in_features that all rows pass over before the next.
constexpr int kGroupTileRows = 4;
constexpr int64_t kGroupChainElements = 2048;
constexpr int64_t kGroupPrefetchBytes = 12288;

// Products of tiles. Measured on a Sapphire Rapids (docs/internals/kernels.md): the most tiles
// along the depth that all rows meet before the next, whose weights, 32 KB, stay in L1; bytes of
// rows that stay in L2 while panels pass, and the least and the most of these rows, multiples
// of 32.
constexpr int64_t kMatrixChainTiles = 16;
constexpr int64_t kMatrixBlockBytes = 1 << 20;
constexpr int64_t kMatrixLeastRows = 64, kMatrixMostRows = 512;
// Not yet measured: rows up to which weights with groups are multiplied by vectors; how far ahead
// up to 16 rows fetch; bytes of L1 for products of groups that wait for their scales, of the next
// ones, and for the numbers of these.
constexpr int64_t kGroupVectorRows = 4;
constexpr int64_t kMatrixPrefetchBytes = 8192;
constexpr int64_t kMatrixGroupBytes = 32 << 10;

// The least time of a task for another thread, which the products of a model find awake. Estimates
// of what a panel and a row take, with vectors of AVX-512.
constexpr double kTaskNanoseconds = 5000.0;
constexpr double kWeightBytesPerNanosecond = 25.0;
constexpr double kProductBytesPerNanosecond = 200.0;
constexpr double kGroupProductsPerNanosecond = 90.0;
constexpr double kNanosecondsPerPreparedElement = 0.2;
constexpr double kPackNanosecondsPerByte = 0.4;
constexpr double kNanosecondsPerNormElement = 0.1;

}  // namespace lmdecode::linear::tuning
