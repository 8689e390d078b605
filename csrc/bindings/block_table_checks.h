// Whatever an op follows in a block table is a block.
#pragma once

#include "bindings/tensor_checks.h"
#include "kv_cache/block_table.h"

namespace lmdecode::kv_cache {

// A row's blocks from the first-th on; those before the kept-th may have been let go of. name: that
// of the tensor.
inline void check_blocks(const char* op, const char* name, const BlockTable& table, int64_t row,
                         int64_t first, int64_t kept) {
  const int64_t used = table.blocks_for(table.lengths[row]);
  for (int64_t b = first; b < used; ++b) {
    const int32_t block = table.row(row)[b];
    if (table.has_block(block) && table.ref_counts[block] > 0) continue;
    if (block == kNoBlock && b < kept) continue;
    fail(op, name, "[", row, ", ", b, "] is ", block, "; expected a block in use, 0 to ",
         table.num_blocks - 1);
  }
}

// The most blocks that a row takes for some tokens more: those behind its last one, and a copy of
// that where it is shared.
inline int64_t most_blocks_taken(const BlockTable& table, int64_t row, int64_t tokens) {
  const int64_t length = table.lengths[row];
  if (tokens == 0) return 0;
  return table.blocks_for(length + tokens) - table.blocks_for(length) +
         (length % table.block_size != 0 ? 1 : 0);
}

// The next `count` blocks that would be taken.
inline void check_free_blocks(const char* op, const char* name, const BlockTable& table,
                              int64_t count) {
  const int32_t free = table.counters[kFreeBlocks];
  for (int64_t i = free - 1; i >= 0 && i >= free - count; --i) {
    if (table.has_block(table.free_blocks[i])) continue;
    fail(op, name, "[", i, "] is ", table.free_blocks[i], "; expected 0 to ", table.num_blocks - 1);
  }
}

}  // namespace lmdecode::kv_cache
