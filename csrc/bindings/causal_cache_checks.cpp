// The caches of decoder-only models: see causal_caches() in bindings/causal_checks.h.
#include "bindings/causal_checks.h"

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

}  // namespace lmdecode::decoder
