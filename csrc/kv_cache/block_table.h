// Block table of a paged cache whose rows share blocks: the blocks of each row, the reference count
// of each block, and the free blocks. docs/reference/kv_cache.md is the user's page.
//
// Position p of row r is in block table[r][p / block_size], at p % block_size. Only the sole owner
// of a block writes to it: if a row shares its last, partly filled block, an append copies that
// block first. Full blocks are never written again, and never copied.
//
// Host code on CPU tensors: it must find a shortage of blocks before it changes anything, which on
// a device would need a synchronisation.
#pragma once

#include <cstdint>

#include "kv_cache/integer_rows.h"

namespace lmdecode::kv_cache {

constexpr int32_t kNoBlock = -1;

// Counters of a table.
enum BlockCounter { kFreeBlocks, kBlockCopies, kMissingBlocks, kBlockCounters };

struct BlockTable {
  int32_t* blocks = nullptr;       // [rows, max_blocks], kNoBlock after a row's last one
  int64_t row_stride = 0;          // elements
  int32_t* lengths = nullptr;      // [rows] positions in use
  int32_t* ref_counts = nullptr;   // [num_blocks] rows that use the block
  int32_t* free_blocks = nullptr;  // [num_blocks], a stack: the first counters[kFreeBlocks] hold
  int32_t* counters = nullptr;     // [kBlockCounters]
  int64_t rows = 0;
  int64_t max_blocks = 0;  // of a row
  int32_t num_blocks = 0;
  int32_t block_size = 1;

  int32_t* row(int64_t r) const { return blocks + r * row_stride; }
  int64_t blocks_for(int64_t length) const { return (length + block_size - 1) / block_size; }
  bool has_block(int32_t block) const { return block >= 0 && block < num_blocks; }
};

// A copy of the first `positions` of a block, to be made before anything is written.
struct BlockCopy {
  int32_t source, target, positions;
};

// Makes room for num_tokens.at(r) >= 0 more positions in each row, and adds them to the lengths.
// copies[rows] receives counters[kBlockCopies] entries; no target among them is a source. If blocks
// are missing, counters[kMissingBlocks] is their number, and nothing else has changed. The binding
// has checked that lengths stay within max_blocks and that block ids are valid.
void append_to_block_table(const BlockTable& table, const IntegerRows& num_tokens,
                           BlockCopy* copies);

// Number of blocks that append_to_block_table() would need beyond the free ones; 0: it succeeds.
// It counts in ref_counts, and restores them.
int64_t missing_blocks(const BlockTable& table, const IntegerRows& num_tokens);

// Releases a row's blocks before the first_block-th, which must not be read through it again, and
// sets their entries to kNoBlock. Their positions still count in the row's length.
void drop_leading_blocks(const BlockTable& table, int64_t row, int64_t first_block);

// Truncates a row to a length, at most its own.
void truncate_row(const BlockTable& table, int64_t row, int64_t length);

// Sets row i of the first parents.rows to the former row parents.at(i) of the first `rows`, without
// copying blocks. Later rows become empty. Blocks that no row uses become free.
void reorder_block_table(const BlockTable& table, int64_t rows, const ParentRows& parents);

}  // namespace lmdecode::kv_cache
