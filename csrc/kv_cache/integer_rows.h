// One integer a row, in the caller's integer type and place: parents, lengths.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace lmdecode::kv_cache {

// data[rows]
struct IntegerRows {
  const void* data = nullptr;
  int64_t stride = 1;  // elements
  bool is_int32 = false;

  LMD_HOST_DEVICE int64_t at(int64_t row) const {
    return is_int32 ? static_cast<const int32_t*>(data)[row * stride]
                    : static_cast<const int64_t*>(data)[row * stride];
  }
};

// Row r goes on where row at(r) was.
struct ParentRows : IntegerRows {
  int32_t rows = 0;

  LMD_HOST_DEVICE bool contains(int64_t parent) const { return parent >= 0 && parent < rows; }
};

// The same length for all rows, or one a row.
struct RowLengths {
  IntegerRows rows;  // data null: `all` holds for every row
  int64_t all = 0;

  LMD_HOST_DEVICE int64_t at(int64_t row) const {
    return rows.data != nullptr ? rows.at(row) : all;
  }
};

}  // namespace lmdecode::kv_cache
