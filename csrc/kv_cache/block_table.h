// The bookkeeping of a cache in blocks that rows share: which blocks a row's positions lie in, how
// many rows use each block, which are free. docs/reference/kv_cache.md is the user's page.
//
// Row r's position p lies in block table[r][p / block_size], at p % block_size. A block is written
// to only by a row that has it alone: a row that is to be appended to and shares its last, partly
// filled block goes on in a copy of it. Full blocks are never written again, and never copied.
//
// It is host code on CPU tensors: that there are too few blocks has to be known before anything
// is changed, which a device could not tell without being waited for.
#pragma once

#include <cstdint>

#include "kv_cache/integer_rows.h"

namespace lmdecode::kv_cache {

constexpr int32_t kNoBlock = -1;

// Counters of a table.
enum BlockCounter { kFreeBlocks, kBlockCopies, kMissingBlocks, kBlockCounters };

struct BlockTable {
  int32_t* blocks = nullptr;       // [rows, max_blocks], kNoBlock behind a row's last one
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

// What a copy-on-write asks to be copied, before anything is written: `positions` of a block.
struct BlockCopy {
  int32_t source, target, positions;
};

// Makes room for num_tokens.at(r) >= 0 more positions in each row, and counts them. copies[rows]
// receives counters[kBlockCopies] entries; no target among them is a source. Where blocks are
// missing, counters[kMissingBlocks] says how many, and nothing else has changed. The binding has
// looked that lengths stay within max_blocks and that blocks are blocks.
void append_to_block_table(const BlockTable& table, const IntegerRows& num_tokens,
                           BlockCopy* copies);

// Free blocks that append_to_block_table() would take beyond those that there are; 0: it succeeds.
// It counts in ref_counts, which are afterwards what they were.
int64_t missing_blocks(const BlockTable& table, const IntegerRows& num_tokens);

// A row lets go of its blocks before the first_block-th, which nobody will ask it for again:
// kNoBlock stands in their places. What they held still counts in its length.
void drop_leading_blocks(const BlockTable& table, int64_t row, int64_t first_block);

// A row goes back to a length, at most its own.
void truncate_row(const BlockTable& table, int64_t row, int64_t length);

// Row i of the first parents.rows becomes what row parents.at(i) of the first `rows` was, without a
// block being copied; the rows behind become empty. Blocks that nobody uses any more become free.
void reorder_block_table(const BlockTable& table, int64_t rows, const ParentRows& parents);

}  // namespace lmdecode::kv_cache
