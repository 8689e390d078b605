// reorder_cache_: row r of each cache tensor receives the former content of row parents[r], in
// place. docs/reference/kv_cache.md is the user's page.
//
// Bytes are moved and nothing else, so the dtype does not matter; rows that keep their content are
// not touched. The order of the copies (row_copies.h) is found once a call. One part of the rows of
// one tensor is then one thread's work over all copies: parts do not depend on each other, whatever
// the parent map, and a cycle needs room for one part, not for a row.
#pragma once

#include <cstdint>

#include "kv_cache/cache_rows.h"
#include "kv_cache/integer_rows.h"

namespace lmdecode::kv_cache {

struct ReorderCacheParams {
  const CacheRows* tensors = nullptr;  // [count]; no two share a byte
  int64_t count = 0;
  ParentRows parents;
};

// Runs on the calling thread and torch's worker threads. The parents are in range: the binding has
// looked.
void reorder_cache_cpu(const ReorderCacheParams& params);

// stream is a cudaStream_t; launches only. A row whose parent is out of range keeps its content.
// Throws std::invalid_argument, before the first launch, for more rows than fit in shared memory.
void reorder_cache_cuda(const ReorderCacheParams& params, void* stream);

}  // namespace lmdecode::kv_cache
