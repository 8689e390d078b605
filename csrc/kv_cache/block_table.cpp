#include "kv_cache/block_table.h"

#include <algorithm>
#include <vector>

#include "kv_cache/host_row_copies.h"

namespace lmdecode::kv_cache {
namespace {

int32_t take_block(const BlockTable& table) {
  const int32_t block = table.free_blocks[--table.counters[kFreeBlocks]];
  table.ref_counts[block] = 1;
  return block;
}

void release_block(const BlockTable& table, int32_t block) {
  if (block == kNoBlock) return;  // dropped before
  // The second condition holds in every table that these functions alone have changed.
  if (--table.ref_counts[block] == 0 && table.counters[kFreeBlocks] < table.num_blocks) {
    table.free_blocks[table.counters[kFreeBlocks]++] = block;
  }
}

// The block that the next position of a row is written to, where it is there and not full.
int32_t* open_block(const BlockTable& table, int64_t row) {
  const int64_t length = table.lengths[row];
  if (length % table.block_size == 0) return nullptr;
  return table.row(row) + length / table.block_size;
}

// Rows that are appended to leave last blocks that they share, one after the other: the last one
// that uses a block keeps it. copies receives what each goes on in, with the row for the target.
// Returns how many left, and how many blocks are missing for these and for what is appended.
int32_t leave_shared_blocks(const BlockTable& table, const IntegerRows& num_tokens,
                            BlockCopy* copies, int64_t* missing) {
  int32_t count = 0;
  int64_t needed = 0;
  for (int64_t row = 0; row < table.rows; ++row) {
    const int64_t tokens = num_tokens.at(row);
    if (tokens == 0) continue;
    const int64_t length = table.lengths[row];
    needed += table.blocks_for(length + tokens) - table.blocks_for(length);
    const int32_t* const open = open_block(table, row);
    if (open == nullptr || table.ref_counts[*open] == 1) continue;
    --table.ref_counts[*open];
    copies[count++] = {*open, static_cast<int32_t>(row),
                       static_cast<int32_t>(length % table.block_size)};
  }
  *missing = std::max<int64_t>(needed + count - table.counters[kFreeBlocks], 0);
  return count;
}

// As if nobody had left.
void rejoin_blocks(const BlockTable& table, const BlockCopy* copies, int32_t count) {
  for (int32_t i = 0; i < count; ++i) ++table.ref_counts[copies[i].source];
}

}  // namespace

void append_to_block_table(const BlockTable& table, const IntegerRows& num_tokens,
                           BlockCopy* copies) {
  int64_t missing = 0;
  const int32_t count = leave_shared_blocks(table, num_tokens, copies, &missing);
  table.counters[kMissingBlocks] = static_cast<int32_t>(missing);
  table.counters[kBlockCopies] = missing > 0 ? 0 : count;
  if (missing > 0) return rejoin_blocks(table, copies, count);
  for (int32_t i = 0; i < count; ++i) {
    const int32_t row = copies[i].target;  // until now
    copies[i].target = take_block(table);
    *open_block(table, row) = copies[i].target;
  }
  for (int64_t row = 0; row < table.rows; ++row) {
    const int64_t length = table.lengths[row] + num_tokens.at(row);
    int32_t* const blocks = table.row(row);
    for (int64_t b = table.blocks_for(table.lengths[row]); b < table.blocks_for(length); ++b) {
      blocks[b] = take_block(table);
    }
    table.lengths[row] = static_cast<int32_t>(length);
  }
}

int64_t missing_blocks(const BlockTable& table, const IntegerRows& num_tokens) {
  std::vector<BlockCopy> copies(static_cast<size_t>(table.rows));
  int64_t missing = 0;
  const int32_t count = leave_shared_blocks(table, num_tokens, copies.data(), &missing);
  rejoin_blocks(table, copies.data(), count);
  return missing;
}

void drop_leading_blocks(const BlockTable& table, int64_t row, int64_t first_block) {
  int32_t* const blocks = table.row(row);
  // Blocks dropped earlier precede all others.
  for (int64_t b = first_block - 1; b >= 0 && blocks[b] != kNoBlock; --b) {
    release_block(table, blocks[b]);
    blocks[b] = kNoBlock;
  }
}

void truncate_row(const BlockTable& table, int64_t row, int64_t length) {
  int32_t* const blocks = table.row(row);
  for (int64_t b = table.blocks_for(length); b < table.blocks_for(table.lengths[row]); ++b) {
    release_block(table, blocks[b]);
    blocks[b] = kNoBlock;
  }
  table.lengths[row] = static_cast<int32_t>(length);
}

void reorder_block_table(const BlockTable& table, int64_t rows, const ParentRows& parents) {
  const size_t all = static_cast<size_t>(std::max<int64_t>(rows, parents.rows));
  std::vector<int32_t> heirs(all);
  std::vector<int64_t> used(all), map(all);
  bool moves = rows != parents.rows;
  for (size_t row = 0; row < all; ++row) {
    const int64_t r = static_cast<int64_t>(row);
    used[row] = r < rows ? table.blocks_for(table.lengths[r]) : 0;
    map[row] = r < parents.rows ? parents.at(r) : r;
    moves |= map[row] != r;
    if (r < parents.rows) ++heirs[static_cast<size_t>(map[row])];
  }
  if (!moves) return;
  // More users first, so that no block becomes free that somebody goes on with.
  for (size_t row = 0; row < all; ++row) {
    const int32_t* const blocks = table.row(static_cast<int64_t>(row));
    for (int64_t b = 0; heirs[row] > 1 && b < used[row]; ++b) {
      if (blocks[b] != kNoBlock) table.ref_counts[blocks[b]] += heirs[row] - 1;
    }
  }
  for (size_t row = 0; row < all; ++row) {
    const int32_t* const blocks = table.row(static_cast<int64_t>(row));
    for (int64_t b = 0; heirs[row] == 0 && b < used[row]; ++b) release_block(table, blocks[b]);
  }

  ParentRows full;
  full.data = map.data();
  full.rows = static_cast<int32_t>(all);
  const std::vector<int32_t> lengths(table.lengths, table.lengths + all);
  std::vector<int32_t> temporary(static_cast<size_t>(table.max_blocks));
  for (const RowCopy copy : host_row_copies(full)) {
    if (copy.to == kTemporaryRow) {
      const int32_t* const from = table.row(copy.from);
      std::copy(from, from + used[static_cast<size_t>(copy.from)], temporary.begin());
      continue;
    }
    const int64_t parent = map[static_cast<size_t>(copy.to)];
    const int64_t count = used[static_cast<size_t>(parent)];
    const int32_t* const from =
        copy.from == kTemporaryRow ? temporary.data() : table.row(copy.from);
    int32_t* const to = table.row(copy.to);
    std::copy(from, from + count, to);
    const int64_t before = used[static_cast<size_t>(copy.to)];
    if (before > count) std::fill(to + count, to + before, kNoBlock);
    table.lengths[copy.to] = lengths[static_cast<size_t>(parent)];
  }
  for (int64_t row = parents.rows; row < rows; ++row) {
    std::fill(table.row(row), table.row(row) + used[static_cast<size_t>(row)], kNoBlock);
    table.lengths[row] = 0;
  }
}

}  // namespace lmdecode::kv_cache
