// Moves the rows of the table to the children of beams.
#pragma once

#include <cstdint>

#include "common/copy_rows.h"
#include "common/split_memory.h"
#include "decoder/decoder_forward.h"

namespace lmdecode::decoder {

struct BeamParents {
  int32_t* parents;    // [beams]: of each beam, counted from the first
  int32_t* readers;    // [beams]
  RowCopy* copies;     // [max_row_copies(beams)]
  int32_t* table_row;  // [capacity]

  void take(SplitMemory* block, int64_t beams, int64_t capacity) {
    block->take(&parents, beams);
    block->take(&readers, beams);
    block->take(&copies, max_row_copies(beams));
    block->take(&table_row, capacity);
  }

  // first: the cache row of the first beam; positions: those that have been written.
  void follow(const DecoderCaches& caches, int64_t first, int64_t beams, int64_t positions) const {
    const int32_t count =
        order_row_copies_of(parents, static_cast<int32_t>(beams), readers, copies);
    copy_rows(copies, count, caches.table + first * caches.capacity, caches.capacity, table_row,
              positions);
  }
};

}  // namespace lmdecode::decoder
