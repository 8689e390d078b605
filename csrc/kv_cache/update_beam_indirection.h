// update_beam_indirection_: a beam step on the index through which attention reads a cache whose
// rows do not move. docs/reference/kv_cache.md is the user's page.
//
// Entry (row, position) of the index names the row of the cache that holds this position of the
// row's sequence. Row r receives the former entries of row parents[r] up to its length; its entry
// at the length becomes r, as the next token of row r is written to row r of the cache.
#pragma once

#include <cstdint>

#include "kv_cache/integer_rows.h"

namespace lmdecode::kv_cache {

struct BeamIndirectionParams {
  int32_t* table = nullptr;  // [rows, capacity], positions contiguous
  int64_t row_stride = 0;    // elements
  int64_t capacity = 0;
  ParentRows parents;
  RowLengths lengths;  // 0 to capacity; at capacity there is no next position
};

// Runs on the calling thread and torch's worker threads. Parents and lengths are in range: the
// binding has looked.
void update_beam_indirection_cpu(const BeamIndirectionParams& params);

// stream is a cudaStream_t; launches only. A row whose parent or length is out of range stays as it
// is. Throws std::invalid_argument, before the launch, for more rows than fit in shared memory.
void update_beam_indirection_cuda(const BeamIndirectionParams& params, void* stream);

}  // namespace lmdecode::kv_cache
