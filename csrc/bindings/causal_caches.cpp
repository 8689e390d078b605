// causal_caches_reorder_ and causal_caches_truncate_: the bookkeeping of a decoder-only model's
// caches between steps.
#include "bindings/causal_checks.h"

namespace lmdecode::decoder {
namespace {

constexpr const char* kReorderOp = "causal_caches_reorder_";
constexpr const char* kTruncateOp = "causal_caches_truncate_";

// Blocks of the sequences that are about to change.
void check_blocks(const char* op, const PagedCache& cache, int64_t row) {
  const kv_cache::BlockTable& table = cache.table;
  for (int64_t b = 0; b < table.blocks_for(table.lengths[row]); ++b) {
    const int32_t block = table.row(row)[b];
    if (block == kv_cache::kNoBlock || (table.has_block(block) && table.ref_counts[block] > 0)) {
      continue;
    }
    fail(op, "caches.blocks[", row, ", ", b, "] is ", block, "; expected a block in use, 0 to ",
         table.num_blocks - 1);
  }
}

const int64_t* integers(const char* op, const char* name, const Tensor& tensor,
                        std::initializer_list<int64_t> sizes) {
  const Tensors tensors{tensor};
  TensorList list(op, "", tensors, 1);
  return list.next<const int64_t>(name, ScalarType::Long, sizes);
}

void reorder(const Tensors& tensors, const Integers& windows, const Tensor& parents) {
  PagedCache caches[kMaxPagedCaches];
  const int64_t count = paged_caches(kReorderOp, tensors, windows, caches);
  const int64_t rows = caches[0].table.rows;
  const int64_t* const data = integers(kReorderOp, "parents", parents, {rows});
  for (int64_t row = 0; row < rows; ++row) {
    check_number(kReorderOp, "parents", row, data[row], 0, rows - 1);
    for (int64_t i = 0; i < count; ++i) check_blocks(kReorderOp, caches[i], row);
  }
  kv_cache::ParentRows map;
  map.data = data;
  map.rows = static_cast<int32_t>(rows);
  for (int64_t i = 0; i < count; ++i) reorder_block_table(caches[i].table, rows, map);
}

// lengths [n, 2]: a sequence, and the length that it goes back to.
void truncate(const Tensors& tensors, const Integers& windows, const Tensor& lengths) {
  PagedCache caches[kMaxPagedCaches];
  const int64_t count = paged_caches(kTruncateOp, tensors, windows, caches);
  const int64_t* const data = integers(kTruncateOp, "lengths", lengths, {-1, 2});
  const int64_t n = lengths.size(0);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t row = data[2 * i], length = data[2 * i + 1];
    check_number(kTruncateOp, "lengths", 2 * i, row, 0, caches[0].table.rows - 1);
    check_number(kTruncateOp, "lengths", 2 * i + 1, length, 0, caches[0].table.lengths[row]);
    for (int64_t c = 0; c < count; ++c) {
      const kv_cache::BlockTable& table = caches[c].table;
      check_blocks(kTruncateOp, caches[c], row);
      const int64_t first = caches[c].first_kept_block(length);
      if (length == 0 || length == table.lengths[row] || first == table.blocks_for(length) ||
          table.row(row)[first] != kv_cache::kNoBlock) {
        continue;
      }
      fail(kTruncateOp, "lengths[", i, "] goes back to ", length, " of ", table.lengths[row],
           " positions; expected a length whose window, ", caches[c].window,
           " positions, is still there");
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t c = 0; c < count; ++c) {
      truncate_row(caches[c].table, data[2 * i],
                   std::min<int64_t>(data[2 * i + 1], caches[c].table.lengths[data[2 * i]]));
    }
  }
}

}  // namespace
}  // namespace lmdecode::decoder

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("causal_caches_reorder_", TORCH_BOX(&lmdecode::decoder::reorder));
  m.impl("causal_caches_truncate_", TORCH_BOX(&lmdecode::decoder::truncate));
}
