// The arguments of the CPU kernel of reorder_cache_, and the kernel at every level.
#pragma once

#include <cstdint>

#include "common/row_copies.h"
#include "kv_cache/cache_rows.h"
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

}  // namespace lmdecode::kv_cache

LMD_DECLARE_KERNELS(kv_cache,
                    // Parts [begin, end) of the job's tensors.
                    void reorder_cache_parts(const ReorderJob& job, int64_t begin, int64_t end);)
