// block_table_append_ and block_table_reorder_, the bookkeeping of a cache in blocks: on the CPU
// alone.
#include "kv_cache/block_table.h"

#include "bindings/kv_cache_checks.h"

namespace lmdecode::kv_cache {
namespace {

constexpr const char* kAppendOp = "block_table_append_";
constexpr const char* kReorderTableOp = "block_table_reorder_";

void check_on_cpu(const char* op, const char* name, const Tensor& tensor) {
  if (tensor.is_cpu()) return;
  fail(op, name, " is on ", device_name(tensor), "; expected cpu, where block tables are kept");
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
  const auto int32_data = [&](const char* name, const Tensor& tensor, int64_t size) {
    if (!tensor.is_contiguous()) fail(op, name, " is not contiguous; expected it to be");
    return Arguments(op).contiguous<int32_t>(name, tensor, {size});
  };
  table.lengths = int32_data("lengths", lengths, table.rows);
  table.ref_counts = int32_data("ref_counts", ref_counts, num_blocks);
  table.free_blocks = int32_data("free_blocks", free_blocks, num_blocks);
  table.counters = int32_data("counters", counters, kBlockCounters);
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

void append(const Tensor& blocks, const Tensor& lengths, const Tensor& ref_counts,
            const Tensor& free_blocks, const Tensor& counters, const Tensor& copies,
            const Tensor& num_tokens, int64_t block_size) {
  constexpr const char* kOp = kAppendOp;
  const BlockTable table =
      block_table(kOp, blocks, lengths, ref_counts, free_blocks, counters, block_size);
  int32_t* const copies_data =
      Arguments(kOp).contiguous<int32_t>("copies", copies, {table.rows, 3});
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
    if (length > 0) check_blocks(kOp, "block_table", table, row, (length - 1) / block_size, 0);
    most_taken += most_blocks_taken(table, row, tokens.at(row));
  }
  check_free_blocks(kOp, "free_blocks", table, most_taken);
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
    check_blocks(kOp, "block_table", table, row, 0, 0);
  }
  reorder_block_table(table, rows, map);
}

}  // namespace
}  // namespace lmdecode::kv_cache

// For tensors of any device, so that an error names a wrong device.
STABLE_TORCH_LIBRARY_IMPL(lmdecode, CompositeExplicitAutograd, m) {
  m.impl("block_table_append_", TORCH_BOX(&lmdecode::kv_cache::append));
  m.impl("block_table_reorder_", TORCH_BOX(&lmdecode::kv_cache::reorder));
}
