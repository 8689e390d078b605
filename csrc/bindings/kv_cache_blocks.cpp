// The ops of a cache in blocks on CPU tensors, and the bookkeeping, which is there alone.
#include "bindings/kv_cache_blocks.h"

#include <vector>

namespace lmdecode::kv_cache {
namespace {

void check_copies(const CopyBlocksParams& params) {
  for (int64_t p = 0; p < params.pool_count; ++p) {
    const BlockPool& pool = params.pools[p];
    std::vector<uint8_t> is_source(static_cast<size_t>(pool.num_blocks));
    std::vector<uint8_t> is_target(is_source.size());
    for (int64_t i = 0; i < params.copy_count; ++i) {
      const BlockCopy copy = params.copies[i];
      if (!pool.has_block(copy.source) || !pool.has_block(copy.target) || copy.positions < 0 ||
          copy.positions > pool.block_size) {
        fail(kCopyBlocksOp, "copies[", i, "] is (", copy.source, ", ", copy.target, ", ",
             copy.positions, "); expected blocks 0 to ", pool.num_blocks - 1, " and 0 to ",
             pool.block_size, " positions, those of ", nth_pool(static_cast<size_t>(p)));
      }
      is_source[static_cast<size_t>(copy.source)] = 1;
      uint8_t& target = is_target[static_cast<size_t>(copy.target)];
      if (target) {
        fail(kCopyBlocksOp, "copies[", i, "] has the target ", copy.target,
             " of another one; expected each once");
      }
      target = 1;
    }
    for (size_t block = 0; block < is_source.size(); ++block) {
      if (is_source[block] && is_target[block]) {
        fail(kCopyBlocksOp, "copies have block ", block,
             " as a source and as a target; expected no copy to read what another one writes");
      }
    }
  }
}

void copy_blocks(const std::vector<Tensor>& pools, const Tensor& copies) {
  const CopyBlocksArguments arguments(pools, copies);
  const CopyBlocksParams params = arguments.params();
  check_copies(params);
  copy_blocks_cpu(params);
}

// --- Bookkeeping

constexpr const char* kAppendOp = "block_table_append_";
constexpr const char* kReorderTableOp = "block_table_reorder_";

void check_on_cpu(const char* op, const char* name, const Tensor& tensor) {
  if (tensor.is_cpu()) return;
  fail(op, name, " is on ", device_name(tensor), "; expected cpu, where block tables are kept");
}

int32_t* int32_data(const char* op, const char* name, const Tensor& tensor, int64_t size,
                    int64_t columns = -1) {
  check_on_cpu(op, name, tensor);
  check_shape(op, name, tensor, size, columns);
  check_dtype(op, name, tensor, ScalarType::Int);
  if (!tensor.is_contiguous()) fail(op, name, " is not contiguous; expected it to be");
  return static_cast<int32_t*>(tensor.mutable_data_ptr());
}

// The state, checked as far as following it stays within its tensors.
BlockTable block_table(const char* op, const Tensor& blocks, const Tensor& lengths,
                       const Tensor& ref_counts, const Tensor& free_blocks, const Tensor& counters,
                       int64_t block_size) {
  check_on_cpu(op, "block_table", blocks);
  check_rank(op, "block_table", blocks, 2, "[rows, max_blocks]");
  check_dtype(op, "block_table", blocks, ScalarType::Int);
  if (block_size < 1 || block_size > std::numeric_limits<int32_t>::max()) {
    fail(op, "block_size is ", block_size, "; expected 1 to 2^31 - 1");
  }
  BlockTable table;
  table.rows = blocks.size(0);
  table.max_blocks = blocks.size(1);
  table.row_stride = blocks.stride(0);
  table.block_size = static_cast<int32_t>(block_size);
  if (!elements_are_apart(strided_tensor(blocks)) ||
      (table.max_blocks > 1 && blocks.stride(1) != 1)) {
    fail(op, "block_table has strides [", table.row_stride, ", ", blocks.stride(1),
         "]; expected blocks side by side, in rows of their own");
  }
  check_rank(op, "ref_counts", ref_counts, 1, "[num_blocks]");
  const int64_t num_blocks = ref_counts.size(0);
  if (num_blocks > std::numeric_limits<int32_t>::max()) {
    fail(op, "ref_counts has shape ", shape_text(ref_counts), "; expected fewer than 2^31 blocks");
  }
  table.num_blocks = static_cast<int32_t>(num_blocks);
  table.blocks = static_cast<int32_t*>(blocks.mutable_data_ptr());
  table.lengths = int32_data(op, "lengths", lengths, table.rows);
  table.ref_counts = int32_data(op, "ref_counts", ref_counts, num_blocks);
  table.free_blocks = int32_data(op, "free_blocks", free_blocks, num_blocks);
  table.counters = int32_data(op, "counters", counters, kBlockCounters);
  const int32_t free = table.counters[kFreeBlocks];
  if (free < 0 || free > num_blocks) {
    fail(op, "counters[0] is ", free, "; expected 0 to ", num_blocks, " free blocks");
  }
  return table;
}

void check_length(const char* op, const BlockTable& table, int64_t row, int64_t length) {
  const int64_t most = table.max_blocks * table.block_size;
  if (length >= 0 && length <= most) return;
  fail(op, "row ", row, " is ", length, " long, or would be; expected 0 to ", most,
       " positions, those of ", table.max_blocks, " blocks");
}

// A row's blocks from the first-th on.
void check_blocks(const char* op, const BlockTable& table, int64_t row, int64_t first) {
  const int64_t used = table.blocks_for(table.lengths[row]);
  for (int64_t b = first; b < used; ++b) {
    const int32_t block = table.row(row)[b];
    if (table.has_block(block) && table.ref_counts[block] > 0) continue;
    fail(op, "block_table[", row, ", ", b, "] is ", block, "; expected a block in use, 0 to ",
         table.num_blocks - 1);
  }
}

// The next `count` blocks that would be taken.
void check_free_blocks(const char* op, const BlockTable& table, int64_t count) {
  const int32_t free = table.counters[kFreeBlocks];
  for (int64_t i = free - 1; i >= 0 && i >= free - count; --i) {
    if (table.has_block(table.free_blocks[i])) continue;
    fail(op, "free_blocks[", i, "] is ", table.free_blocks[i], "; expected 0 to ",
         table.num_blocks - 1);
  }
}

void append(const Tensor& blocks, const Tensor& lengths, const Tensor& ref_counts,
            const Tensor& free_blocks, const Tensor& counters, const Tensor& copies,
            const Tensor& num_tokens, int64_t block_size) {
  constexpr const char* kOp = kAppendOp;
  const BlockTable table =
      block_table(kOp, blocks, lengths, ref_counts, free_blocks, counters, block_size);
  int32_t* const copies_data = int32_data(kOp, "copies", copies, table.rows, 3);
  check_on_cpu(kOp, "num_tokens", num_tokens);
  check_shape(kOp, "num_tokens", num_tokens, table.rows);
  check_integers(kOp, "num_tokens", num_tokens);
  const IntegerRows tokens = integer_rows(num_tokens);
  int64_t most_taken = table.rows;
  for (int64_t row = 0; row < table.rows; ++row) {
    const int64_t length = table.lengths[row];
    check_length(kOp, table, row, length);
    if (tokens.at(row) < 0 || tokens.at(row) > table.max_blocks * table.block_size - length) {
      fail(kOp, "num_tokens[", row, "] is ", tokens.at(row), "; expected 0 to ",
           table.max_blocks * table.block_size - length, ", what ", table.max_blocks,
           " blocks have room for behind ", length, " positions");
    }
    if (length > 0) check_blocks(kOp, table, row, (length - 1) / block_size);
    most_taken += table.blocks_for(length + tokens.at(row)) - table.blocks_for(length);
  }
  check_free_blocks(kOp, table, most_taken);
  append_to_block_table(table, tokens, reinterpret_cast<BlockCopy*>(copies_data));
}

void reorder(const Tensor& blocks, const Tensor& lengths, const Tensor& ref_counts,
             const Tensor& free_blocks, const Tensor& counters, const Tensor& parents, int64_t rows,
             int64_t block_size) {
  constexpr const char* kOp = kReorderTableOp;
  const BlockTable table =
      block_table(kOp, blocks, lengths, ref_counts, free_blocks, counters, block_size);
  check_on_cpu(kOp, "parents", parents);
  const ParentRows map = parent_rows(kOp, parents);
  if (rows < 0 || rows > table.rows) {
    fail(kOp, "rows is ", rows, "; expected 0 to ", table.rows, ", the rows of block_table");
  }
  if (map.rows > table.rows) {
    fail(kOp, "parents has shape ", shape_text(parents), "; expected at most ", table.rows,
         " entries, the rows of block_table");
  }
  for (int64_t row = 0; row < map.rows; ++row) {
    if (map.at(row) >= 0 && map.at(row) < rows) continue;
    fail(kOp, "parents[", row, "] is ", map.at(row), "; expected 0 to ", rows - 1);
  }
  for (int64_t row = 0; row < rows; ++row) {
    check_length(kOp, table, row, table.lengths[row]);
    check_blocks(kOp, table, row, 0);
  }
  reorder_block_table(table, rows, map);
}

}  // namespace
}  // namespace lmdecode::kv_cache

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("copy_blocks_", TORCH_BOX(&lmdecode::kv_cache::copy_blocks));
}

// For tensors of any device, so that those of another one meet an error that says so.
STABLE_TORCH_LIBRARY_IMPL(lmdecode, CompositeExplicitAutograd, m) {
  m.impl("block_table_append_", TORCH_BOX(&lmdecode::kv_cache::append));
  m.impl("block_table_reorder_", TORCH_BOX(&lmdecode::kv_cache::reorder));
}
