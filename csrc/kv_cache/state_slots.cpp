#include "kv_cache/state_slots.h"

#include <algorithm>
#include <vector>

namespace lmdecode::kv_cache {
namespace {

void release_slot(const StateSlots& table, int32_t slot) {
  // The second condition holds in every table that these functions alone have changed.
  if (--table.ref_counts[slot] == 0 && table.counters[kFreeSlots] < table.num_slots) {
    table.free_slots[table.counters[kFreeSlots]++] = slot;
  }
}

template <class Keep>
void keep_those(const StateSlots& table, int64_t row, const Keep& keep) {
  int32_t* const positions = table.positions + row * table.max_kept;
  int32_t* const slots = table.slots + row * table.max_kept;
  int64_t to = 0;
  const int64_t count = table.kept(row);
  for (int64_t i = 0; i < count; ++i) {
    if (keep(positions[i])) {
      positions[to] = positions[i];
      slots[to++] = slots[i];
    } else {
      release_slot(table, slots[i]);
    }
  }
  std::fill(positions + to, positions + count, 0);
  std::fill(slots + to, slots + count, kNoSlot);
}

}  // namespace

int64_t StateSlots::kept(int64_t row) const {
  const int32_t* const of_row = slots + row * max_kept;
  return std::find(of_row, of_row + max_kept, kNoSlot) - of_row;
}

bool StateSlots::keeps(int64_t row, int64_t position, int64_t length) const {
  if (position >= length - counters[kRollback]) return true;
  const int64_t interval = counters[kInterval];
  if (interval == 0) return false;
  const int64_t prompt = prompt_ends[row];
  if (position == prompt || position == prompt - 1) return true;
  for (int64_t s = interval; s <= position && position % s == 0; s *= 4) {
    if (length - position < 2 * s) return true;
  }
  return false;
}

int32_t StateSlots::find(int64_t row, int64_t position) const {
  for (int64_t i = kept(row) - 1; i >= 0; --i) {
    if (positions[row * max_kept + i] == position) return slots[row * max_kept + i];
  }
  return kNoSlot;
}

int64_t states_to_keep(const StateSlots& table, int64_t row, int64_t length, int64_t count) {
  int64_t kept = 0;
  for (int64_t position = length + 1; position <= length + count; ++position) {
    kept += table.keeps(row, position, length + count) ? 1 : 0;
  }
  return kept;
}

int32_t take_state_slot(const StateSlots& table, int64_t row, int64_t position) {
  const int64_t at = row * table.max_kept + table.kept(row);
  const int32_t slot = table.free_slots[--table.counters[kFreeSlots]];
  table.ref_counts[slot] = 1;
  table.positions[at] = static_cast<int32_t>(position);
  table.slots[at] = slot;
  return slot;
}

void drop_states(const StateSlots& table, int64_t row, int64_t length) {
  keep_those(table, row, [&](int64_t position) { return table.keeps(row, position, length); });
}

void truncate_states(const StateSlots& table, int64_t row, int64_t length) {
  table.prompt_ends[row] = static_cast<int32_t>(std::min<int64_t>(table.prompt_ends[row], length));
  keep_those(table, row, [&](int64_t position) { return position <= length; });
}

void reorder_states(const StateSlots& table, const ParentRows& parents) {
  const size_t all = static_cast<size_t>(table.rows * table.max_kept);
  const std::vector<int32_t> positions(table.positions, table.positions + all);
  const std::vector<int32_t> slots(table.slots, table.slots + all);
  const std::vector<int32_t> ends(table.prompt_ends, table.prompt_ends + table.rows);
  const auto count_users = [&](int64_t row, auto use) {
    for (int64_t i = row * table.max_kept; i < (row + 1) * table.max_kept; ++i) {
      const int32_t slot = slots[static_cast<size_t>(i)];
      if (slot == kNoSlot) return;
      use(slot);
    }
  };
  // More users first, so that no slot becomes free that somebody goes on with.
  for (int64_t row = 0; row < table.rows; ++row) {
    if (parents.at(row) == row) continue;
    count_users(parents.at(row), [&](int32_t slot) { ++table.ref_counts[slot]; });
  }
  for (int64_t row = 0; row < table.rows; ++row) {
    if (parents.at(row) == row) continue;
    count_users(row, [&](int32_t slot) { release_slot(table, slot); });
    const int64_t from = parents.at(row) * table.max_kept;
    std::copy_n(positions.begin() + from, table.max_kept, table.positions + row * table.max_kept);
    std::copy_n(slots.begin() + from, table.max_kept, table.slots + row * table.max_kept);
    table.prompt_ends[row] = ends[static_cast<size_t>(parents.at(row))];
  }
}

}  // namespace lmdecode::kv_cache
