// Checks shared by the KV cache ops: tensors as bytes, rows of integers, parents, blocks.
#pragma once

#include <limits>

#include "bindings/tensor_checks.h"
#include "kv_cache/block_table.h"
#include "kv_cache/integer_rows.h"
#include "kv_cache/strided_tensor.h"

namespace lmdecode::kv_cache {

inline StridedTensor strided_tensor(const Tensor& tensor) {
  StridedTensor strided;
  strided.element_bytes = static_cast<int64_t>(tensor.element_size());
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  strided.dims.reserve(sizes.size());
  for (size_t d = 0; d < sizes.size(); ++d) {
    strided.dims.push_back({sizes[d], strides[d] * strided.element_bytes});
  }
  return strided;
}

// strided_tensor() with the address of a read-only tensor.
inline StridedTensor strided_input(const Tensor& tensor) {
  StridedTensor strided = strided_tensor(tensor);
  strided.data = static_cast<unsigned char*>(const_cast<void*>(tensor.const_data_ptr()));
  return strided;
}

// Throws where two tensors have a byte in common, between strides too. Expanded dimensions of the
// first hold the same bytes again.
inline void check_shares_no_bytes(const char* op, const char* name, const Tensor& tensor,
                                  const char* other_name, const Tensor& other) {
  if (!MemorySpan(tensor).meets(MemorySpan(other))) return;
  StridedTensor distinct = strided_input(tensor);
  for (StridedDim& dim : distinct.dims) {
    if (dim.stride == 0 && dim.size > 1) dim.size = 1;
  }
  if (tensors_share_bytes(strided_input(other), distinct)) {
    fail(op, name, " shares memory with ", other_name, "; expected a tensor of its own");
  }
}

inline void check_integers(const char* op, const char* name, const Tensor& tensor) {
  const ScalarType type = dtype_of(tensor);
  if (type != ScalarType::Long && type != ScalarType::Int) {
    fail(op, name, " has dtype ", dtype_name(type), "; expected int64 or int32");
  }
}

// [rows] int64 or int32
inline IntegerRows integer_rows(const Tensor& tensor) {
  IntegerRows rows;
  rows.data = tensor.const_data_ptr();
  rows.stride = tensor.stride(0);
  rows.is_int32 = dtype_of(tensor) == ScalarType::Int;
  return rows;
}

inline ParentRows parent_rows(const char* op, const Tensor& parents) {
  check_rank(op, "parents", parents, 1, "[batch]");
  check_integers(op, "parents", parents);
  if (parents.size(0) > std::numeric_limits<int32_t>::max() / 2) {
    fail(op, "parents has shape ", shape_text(parents), "; expected fewer than 2^30 rows");
  }
  return {integer_rows(parents), static_cast<int32_t>(parents.size(0))};
}

// For parents on the CPU only.
inline void check_parents(const char* op, const ParentRows& parents) {
  for (int64_t row = 0; row < parents.rows; ++row) {
    const int64_t parent = parents.at(row);
    if (!parents.contains(parent)) {
      fail(op, "parents[", row, "] is ", parent, "; expected 0 to ", parents.rows - 1);
    }
  }
}

// Checks a row's blocks from index `first` on; blocks before index `kept` may have been freed.
// name: the tensor's.
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

// The most blocks that a row takes for `tokens` more: new ones, and a copy of a shared last one.
inline int64_t most_blocks_taken(const BlockTable& table, int64_t row, int64_t tokens) {
  const int64_t length = table.lengths[row];
  if (tokens == 0) return 0;
  return table.blocks_for(length + tokens) - table.blocks_for(length) +
         (length % table.block_size != 0 ? 1 : 0);
}

// Checks the next `count` free blocks.
inline void check_free_blocks(const char* op, const char* name, const BlockTable& table,
                              int64_t count) {
  const int32_t free = table.counters[kFreeBlocks];
  for (int64_t i = free - 1; i >= 0 && i >= free - count; --i) {
    if (table.has_block(table.free_blocks[i])) continue;
    fail(op, name, "[", i, "] is ", table.free_blocks[i], "; expected 0 to ", table.num_blocks - 1);
  }
}

}  // namespace lmdecode::kv_cache
