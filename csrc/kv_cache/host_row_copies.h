// The order of the copies of a parent map, found on the host.
#pragma once

#include <cstddef>
#include <vector>

#include "common/row_copies.h"
#include "kv_cache/integer_rows.h"

namespace lmdecode::kv_cache {

// The parents are in range.
inline std::vector<RowCopy> host_row_copies(const ParentRows& given) {
  const int32_t rows = given.rows;
  std::vector<int32_t> parents(static_cast<size_t>(rows)), readers(static_cast<size_t>(rows));
  for (int32_t row = 0; row < rows; ++row) {
    const int32_t parent = static_cast<int32_t>(given.at(row));
    parents[static_cast<size_t>(row)] = parent;
    if (parent != row) ++readers[static_cast<size_t>(parent)];
  }
  std::vector<RowCopy> copies(static_cast<size_t>(max_row_copies(rows)));
  copies.resize(
      static_cast<size_t>(order_row_copies(parents.data(), rows, readers.data(), copies.data())));
  return copies;
}

}  // namespace lmdecode::kv_cache
