// States of recurrent layers: which of them a sequence keeps, in slots that sequences share.
// docs/reference/kv_cache.md is the user's page of block tables.
//
// A row is a sequence. It keeps the state after its last token, and after some earlier tokens, to
// which it can be truncated. A slot is written once, when it is taken, so that rows that share
// slots never copy any. Host code on CPU tensors.
//
// What a row of a length keeps depends on the length and on prompt_ends alone:
//   - the state behind each of the last `rollback` tokens before its last one;
//   - where `interval` is not 0: those behind the end of its prompt and behind the token before
//     that, and those of positions that are whole multiples of s, the last two, for each s of
//     interval, 4 interval, 16 interval and so on.
#pragma once

#include <cstdint>

#include "kv_cache/integer_rows.h"

namespace lmdecode::kv_cache {

constexpr int32_t kNoSlot = -1;

enum StateCounter { kFreeSlots, kRollback, kInterval, kStateCounters };

struct StateSlots {
  int32_t* positions = nullptr;    // [rows, max_kept], ascending: tokens that the state has seen
  int32_t* slots = nullptr;        // [rows, max_kept], kNoSlot after the last one
  int32_t* prompt_ends = nullptr;  // [rows] length of what was read as a prompt last
  int32_t* ref_counts = nullptr;   // [num_slots] rows that keep the slot
  int32_t* free_slots = nullptr;   // [num_slots], a stack: the first counters[kFreeSlots] hold
  int32_t* counters = nullptr;     // [kStateCounters]
  int64_t rows = 0;
  int64_t max_kept = 0;
  int64_t num_slots = 0;

  int64_t kept(int64_t row) const;
  bool keeps(int64_t row, int64_t position, int64_t length) const;
  // The slot of the state after `position` tokens; kNoSlot if it is not kept.
  int32_t find(int64_t row, int64_t position) const;
};

// Number of states kept while appending `count` tokens at `length`. Set the row's prompt_end to its
// new value first.
int64_t states_to_keep(const StateSlots& table, int64_t row, int64_t length, int64_t count);

// Takes a slot for a position after all that the row keeps. Requires a free slot, and room in the
// row.
int32_t take_state_slot(const StateSlots& table, int64_t row, int64_t position);

// Releases what a row of this length does not keep.
void drop_states(const StateSlots& table, int64_t row, int64_t length);

// Releases the states after a length, which is 0 or one at which the row keeps a state.
void truncate_states(const StateSlots& table, int64_t row, int64_t length);

// Sets row i to the former row parents.at(i), of as many rows; no state is copied.
void reorder_states(const StateSlots& table, const ParentRows& parents);

}  // namespace lmdecode::kv_cache
