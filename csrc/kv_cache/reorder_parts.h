// How the rows of a tensor are cut into parts for threads: pure arithmetic, host code.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/row_copies.h"
#include "kv_cache/cache_rows.h"
#include "kv_cache/kv_cache_tuning.h"
#include "simd/kernel_levels.h"

namespace lmdecode::kv_cache {

// A tensor cut into parts: runs of `run` neighbouring segments, or pieces of a longer segment.
struct ReorderParts {
  CacheRows rows;
  int64_t first_part = 0;  // of the call's parts, numbered through all tensors
  int64_t run = 1;
  int64_t runs = 1;  // along the last dimension
  int64_t piece_bytes = 0;
  int64_t pieces = 1;  // of a segment
};

struct ReorderJob {
  const ReorderParts* tensors = nullptr;
  int64_t count = 0;
  const RowCopy* copies = nullptr;
  int32_t copy_count = 0;
  // [copy_count] 1: no copy before it has read its target, which is then in no cache, and goes
  // past them. Null: all copies go through the caches.
  const uint8_t* cold = nullptr;
};

inline ReorderParts cut_into_parts(const CacheRows& rows, int64_t first_part) {
  using namespace tuning;
  ReorderParts t;
  t.rows = rows;
  t.first_part = first_part;
  const int64_t segment = rows.segment_bytes;
  t.pieces = (segment + kPartBytes - 1) / kPartBytes;
  // Pieces of equal length but for the last, of whole cache lines.
  t.piece_bytes = std::min(segment, ((segment + t.pieces - 1) / t.pieces + 63) / 64 * 64);
  if (rows.dims > 0) {
    const int64_t size = rows.size[rows.dims - 1], stride = rows.stride[rows.dims - 1];
    t.run = std::clamp(std::min(kPartBytes / segment, kRunSpanBytes / stride), int64_t{1}, size);
    t.runs = (size + t.run - 1) / t.run;
  }
  return t;
}

inline int64_t part_count(const ReorderParts& t) {
  int64_t count = t.pieces * t.runs;
  for (int d = 0; d < t.rows.dims - 1; ++d) count *= t.rows.size[d];
  return count;
}

// ReorderJob::cold.
inline std::vector<uint8_t> find_cold_copies(const RowCopy* copies, int32_t count, int32_t rows) {
  std::vector<uint8_t> cold(static_cast<size_t>(count)), was_read(static_cast<size_t>(rows));
  for (int32_t i = 0; i < count; ++i) {
    const RowCopy copy = copies[i];
    if (copy.to != kTemporaryRow) {
      cold[static_cast<size_t>(i)] = !was_read[static_cast<size_t>(copy.to)];
    }
    if (copy.from != kTemporaryRow) was_read[static_cast<size_t>(copy.from)] = 1;
  }
  return cold;
}

}  // namespace lmdecode::kv_cache

LMD_DECLARE_KERNELS(kv_cache,
                    // Parts [begin, end) of those that the tensors of the job are cut into.
                    void reorder_cache_parts(const ReorderJob& job, int64_t begin, int64_t end);)
