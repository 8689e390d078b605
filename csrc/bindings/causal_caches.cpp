// causal_caches_reorder_, causal_caches_start_ and causal_caches_truncate_: the bookkeeping of a
// decoder-only model's caches between steps.
#include <algorithm>
#include <string>
#include <vector>

#include "bindings/block_table_checks.h"
#include "bindings/causal_checks.h"

namespace lmdecode::decoder {
namespace {

constexpr const char* kReorderOp = "causal_caches_reorder_";
constexpr const char* kStartOp = "causal_caches_start_";
constexpr const char* kTruncateOp = "causal_caches_truncate_";

// Blocks of a sequence that is about to change; any of them may have been let go of.
void check_sequence(const char* op, const PagedCache& cache, int64_t row) {
  check_blocks(op, "caches.blocks", cache.table, row, 0, cache.table.max_blocks);
}

void reorder(const Tensors& tensors, const Integers& windows, const Tensor& parents) {
  const CausalCacheList found = causal_caches(kReorderOp, tensors, windows);
  const PagedCache* const caches = found.caches;
  const int64_t count = found.count;
  const int64_t rows = caches[0].table.rows;
  const int64_t* const data =
      Arguments(kReorderOp).contiguous<const int64_t>("parents", parents, {rows});
  for (int64_t row = 0; row < rows; ++row) {
    check_number(kReorderOp, "parents", row, data[row], 0, rows - 1);
    for (int64_t i = 0; i < count; ++i) check_sequence(kReorderOp, caches[i], row);
  }
  kv_cache::ParentRows map;
  map.data = data;
  map.rows = static_cast<int32_t>(rows);
  for (int64_t i = 0; i < count; ++i) reorder_block_table(caches[i].table, rows, map);
  if (found.has_states()) reorder_states(found.states.slots, map);
}

// Blocks that would be taken for sequences of these lengths, [rows], and those that are free.
void check_room(const char* op, const PagedCache& cache, const std::vector<int64_t>& lengths) {
  const kv_cache::BlockTable& table = cache.table;
  const int32_t free = table.counters[kv_cache::kFreeBlocks];
  int64_t needed = 0;
  for (const int64_t length : lengths) {
    needed += table.blocks_for(length) - cache.first_kept_block(length);
  }
  if (needed > free) {
    fail(op, "caches.counters[0] is ", free, "; expected ", needed, " free blocks at least");
  }
  check_free_blocks(op, "caches.free_blocks", table, free);
}

// lengths [n, 2]: an empty sequence, and the length that it begins with. Layers with a window get
// the blocks that this length keeps alone.
void start(const Tensors& tensors, const Integers& windows, const Tensor& lengths) {
  const CausalCacheList found = causal_caches(kStartOp, tensors, windows);
  const PagedCache* const caches = found.caches;
  const int64_t count = found.count;
  const int64_t* const data =
      Arguments(kStartOp).contiguous<const int64_t>("lengths", lengths, {-1, 2});
  const kv_cache::BlockTable& first = caches[0].table;
  int64_t most = kMaxDecoderSize - 1;
  for (int64_t i = 0; i < count; ++i) {
    most = std::min(most, first.max_blocks * caches[i].table.block_size);
  }
  std::vector<int64_t> started(static_cast<size_t>(first.rows), 0);
  for (int64_t i = 0; i < lengths.size(0); ++i) {
    const int64_t row = data[2 * i], length = data[2 * i + 1];
    check_number(kStartOp, "lengths", 2 * i, row, 0, first.rows - 1);
    check_number(kStartOp, "lengths", 2 * i + 1, length, 1, most);
    int64_t& of_row = started[static_cast<size_t>(row)];
    if (first.lengths[row] != 0 || of_row != 0) {
      fail(kStartOp, "lengths[", i, "] names sequence ", row, ", of ", of_row + first.lengths[row],
           " positions; expected an empty one, once");
    }
    of_row = length;
  }
  for (int64_t i = 0; i < count; ++i) check_room(kStartOp, caches[i], started);
  const int64_t needed = lengths.size(0);
  if (found.has_states() && found.states.slots.counters[kv_cache::kFreeSlots] < needed) {
    fail(kStartOp, "caches.counters[0] is ", found.states.slots.counters[kv_cache::kFreeSlots],
         "; expected ", needed, " free slots at least");
  }
  for (int64_t i = 0; i < count; ++i) {
    const kv_cache::BlockTable& table = caches[i].table;
    std::vector<int64_t> added = started;
    for (size_t row = 0; row < added.size(); ++row) {
      if (added[row] == 0) continue;
      // As drop_leading_blocks() leaves it: whole blocks are counted that are not there.
      const int64_t dropped = caches[i].first_kept_block(added[row]);
      std::fill_n(table.row(static_cast<int64_t>(row)), dropped, kv_cache::kNoBlock);
      table.lengths[row] = static_cast<int32_t>(dropped * table.block_size);
      added[row] -= dropped * table.block_size;
    }
    kv_cache::IntegerRows num_tokens;
    num_tokens.data = added.data();
    append_to_block_table(table, num_tokens, nullptr);  // no open block: nothing is copied
  }
  for (size_t row = 0; found.has_states() && row < started.size(); ++row) {
    if (started[row] == 0) continue;
    const int64_t sequence = static_cast<int64_t>(row);
    found.states.slots.prompt_ends[row] = static_cast<int32_t>(started[row]);
    take_state_slot(found.states.slots, sequence, started[row]);
  }
}

// A sequence goes back to where it keeps a state.
void check_state(const kv_cache::StateSlots& slots, int64_t i, int64_t row, int64_t length) {
  if (length == 0 || slots.find(row, length) != kv_cache::kNoSlot) return;
  std::string kept = "0";
  for (int64_t k = 0; k < slots.kept(row); ++k) {
    kept += ", " + std::to_string(slots.positions[row * slots.max_kept + k]);
  }
  fail(kTruncateOp, "lengths[", i, "] goes back to ", length, " positions of sequence ", row,
       "; expected one whose state is kept: ", kept);
}

// lengths [n, 2]: a sequence, and the length that it goes back to.
void truncate(const Tensors& tensors, const Integers& windows, const Tensor& lengths) {
  const CausalCacheList found = causal_caches(kTruncateOp, tensors, windows);
  const PagedCache* const caches = found.caches;
  const int64_t count = found.count;
  const int64_t* const data =
      Arguments(kTruncateOp).contiguous<const int64_t>("lengths", lengths, {-1, 2});
  const int64_t n = lengths.size(0);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t row = data[2 * i], length = data[2 * i + 1];
    check_number(kTruncateOp, "lengths", 2 * i, row, 0, caches[0].table.rows - 1);
    check_number(kTruncateOp, "lengths", 2 * i + 1, length, 0, caches[0].table.lengths[row]);
    if (found.has_states()) check_state(found.states.slots, i, row, length);
    for (int64_t c = 0; c < count; ++c) {
      const kv_cache::BlockTable& table = caches[c].table;
      check_sequence(kTruncateOp, caches[c], row);
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
    if (found.has_states()) truncate_states(found.states.slots, data[2 * i], data[2 * i + 1]);
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
  m.impl("causal_caches_start_", TORCH_BOX(&lmdecode::decoder::start));
  m.impl("causal_caches_truncate_", TORCH_BOX(&lmdecode::decoder::truncate));
}
