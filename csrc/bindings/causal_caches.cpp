// causal_caches_reorder_, causal_caches_start_ and causal_caches_truncate_: the bookkeeping of a
// decoder-only model's caches between steps.
#include <algorithm>
#include <string>
#include <vector>

#include "bindings/causal_checks.h"
#include "bindings/kv_cache_checks.h"

namespace lmdecode::decoder {

namespace {

// Slots and positions that a step follows. lengths: of the sequences.
void check_state_slots(const char* op, const kv_cache::StateSlots& table, const int32_t* lengths) {
  const int32_t free = table.counters[kv_cache::kFreeSlots];
  if (free < 0 || free > table.num_slots) {
    fail(op, "caches.counters[0] is ", free, "; expected 0 to ", table.num_slots, " free slots");
  }
  for (int32_t i = 0; i < free; ++i) {
    const int32_t slot = table.free_slots[i];
    if (slot >= 0 && slot < table.num_slots) continue;
    fail(op, "caches.free_slots[", i, "] is ", slot, "; expected 0 to ", table.num_slots - 1);
  }
  if (table.counters[kv_cache::kRollback] < 0 || table.counters[kv_cache::kInterval] < 0) {
    fail(op, "caches.counters has a rollback of ", table.counters[kv_cache::kRollback],
         " and an interval of ", table.counters[kv_cache::kInterval], "; expected 0 at least");
  }
  for (int64_t row = 0; row < table.rows; ++row) {
    int32_t before = 0;
    for (int64_t i = 0; i < table.max_kept; ++i) {
      const int64_t at = row * table.max_kept + i;
      const int32_t slot = table.slots[at], position = table.positions[at];
      if (slot == kv_cache::kNoSlot) break;
      if (slot < 0 || slot >= table.num_slots || table.ref_counts[slot] < 1) {
        fail(op, "caches.slots[", row, ", ", i, "] is ", slot, "; expected a slot in use, 0 to ",
             table.num_slots - 1);
      }
      if (position <= before || position > lengths[row]) {
        fail(op, "caches.positions[", row, ", ", i, "] is ", position, "; expected ", before + 1,
             " to ", lengths[row]);
      }
      before = position;
    }
  }
}

StateCache state_cache(const char* op, TensorList& list, const kv_cache::BlockTable& first) {
  StateCache states;
  kv_cache::StateSlots& slots = states.slots;
  const Tensor& pool = list.next_tensor();
  check_rank(op, "caches.states", pool, 2, "[slots, state_size]");
  states.pool = list.next<float>("states", {-1, -1});
  slots.num_slots = pool.size(0);
  states.state_size = pool.size(1);
  slots.rows = first.rows;
  const Tensor& positions = list.next_tensor();
  check_rank(op, "caches.positions", positions, 2, "[sequences, kept]");
  slots.positions = list.next<int32_t>("positions", {first.rows, -1});
  slots.max_kept = positions.size(1);
  slots.slots = list.next<int32_t>("slots", {first.rows, slots.max_kept});
  slots.ref_counts = list.next<int32_t>("ref_counts", {slots.num_slots});
  slots.free_slots = list.next<int32_t>("free_slots", {slots.num_slots});
  slots.counters = list.next<int32_t>("counters", {kv_cache::kStateCounters + first.rows});
  slots.prompt_ends = slots.counters + kv_cache::kStateCounters;
  if (states.state_size < 1 || slots.num_slots >= kMaxDecoderSize) {
    fail(op, "caches.states has shape ", shape_text(pool),
         "; expected fewer than 2^31 slots of 1 number at least");
  }
  check_state_slots(op, slots, first.lengths);
  return states;
}

}  // namespace

CausalCacheList causal_caches(const char* op, const Tensors& tensors, const Integers& windows) {
  CausalCacheList found;
  PagedCache* const caches = found.caches;
  const int64_t count = found.count = static_cast<int64_t>(windows.size());
  if (count < 1 || count > kMaxPagedCaches) {
    fail(op, "windows has ", count, " entries; expected 1 to ", kMaxPagedCaches);
  }
  const size_t paged = kCacheTensors * windows.size();
  const bool has_states = tensors.size() == paged + kCacheTensors && tensors[paged].dim() == 2;
  TensorList list(op, "caches", tensors, has_states ? paged + kCacheTensors : paged);
  for (int64_t i = 0; i < count; ++i) {
    PagedCache& cache = caches[i];
    cache.window = windows[static_cast<size_t>(i)];
    if (cache.window < 0 || cache.window >= kMaxDecoderSize) {
      fail(op, "windows[", i, "] is ", cache.window, "; expected 0 to ", kMaxDecoderSize - 1);
    }
    const Tensor& pool = list.next_tensor();
    const ScalarType type = dtype_of(pool);
    cache.is_int8 = type == ScalarType::Char;
    if (type != ScalarType::Float && type != ScalarType::BFloat16 && !cache.is_int8) {
      fail(op, "caches.pool has dtype ", dtype_name(type), "; expected float32, bfloat16 or int8");
    }
    check_rank(op, "caches.pool", pool, 6,
               "[layers, 2, kv_heads, num_blocks, block_size, head_size]");
    if (!cache.is_int8) cache.dtype = float_dtype(op, "caches.pool", pool);
    cache.pool = list.next<unsigned char>("pool", {-1, 2, -1, -1, -1, -1}, type);
    cache.layers = pool.size(0);
    cache.kv_heads = pool.size(2);
    const int64_t num_blocks = pool.size(3);
    cache.head_size = pool.size(5) - (cache.is_int8 ? attention::kInt8ScaleBytes : 0);
    if (pool.size(4) < 1 || pool.size(4) > (1 << 20) || num_blocks >= kMaxDecoderSize) {
      fail(op, "caches.pool has shape ", shape_text(pool),
           "; expected blocks of 1 to 2^20 positions, fewer than 2^31");
    }
    kv_cache::BlockTable& table = cache.table;
    table.block_size = static_cast<int32_t>(pool.size(4));
    table.num_blocks = static_cast<int32_t>(num_blocks);
    const Tensor& blocks = list.next_tensor();
    table.blocks = list.next<int32_t>("blocks", {-1, -1});
    table.rows = blocks.size(0);
    table.max_blocks = table.row_stride = blocks.size(1);
    table.lengths = list.next<int32_t>("lengths", {table.rows});
    table.ref_counts = list.next<int32_t>("ref_counts", {num_blocks});
    table.free_blocks = list.next<int32_t>("free_blocks", {num_blocks});
    table.counters = list.next<int32_t>("counters", {kv_cache::kBlockCounters});
    const int32_t free = table.counters[kv_cache::kFreeBlocks];
    if (free < 0 || free > num_blocks) {
      fail(op, "caches.counters[0] is ", free, "; expected 0 to ", num_blocks, " free blocks");
    }
    const kv_cache::BlockTable& first = caches[0].table;
    if (table.rows != first.rows || table.max_blocks != first.max_blocks) {
      fail(op, "caches.blocks has shape ", shape_text(blocks), "; expected [", first.rows, ", ",
           first.max_blocks, "], as the first cache has");
    }
    for (int64_t row = 0; row < table.rows; ++row) {
      const int32_t length = table.lengths[row];
      if (length < 0 || length > table.max_blocks * table.block_size ||
          length != first.lengths[row]) {
        fail(op, "caches.lengths[", row, "] is ", length, "; expected 0 to ",
             table.max_blocks * table.block_size, ", the same in each cache");
      }
    }
  }
  if (has_states) found.states = state_cache(op, list, caches[0].table);
  return found;
}

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
