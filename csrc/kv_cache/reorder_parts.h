// How the rows of a tensor are cut into parts for threads: pure arithmetic, host code.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kv_cache/kv_cache_tuning.h"
#include "kv_cache/reorder_job.h"

namespace lmdecode::kv_cache {

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
