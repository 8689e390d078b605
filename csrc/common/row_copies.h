// A parent map as an order of row copies, for CPU and CUDA alike.
//
// Row r receives the former content of row parents[r]. A row may be overwritten once no copy needs
// it: rows that no other row reads come first, and each copy may free the row that it read, which
// then goes next. When no row is free, only cycles remain; the first row of each is saved to one
// temporary row. So each moved row is written once and no row is read after it was written.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace lmdecode {

struct RowCopy {
  int32_t to;
  int32_t from;
};

constexpr int32_t kTemporaryRow = -1;

// The most copies of a map of `rows` rows: one a row, and one a cycle of at least two rows.
LMD_HOST_DEVICE int64_t max_row_copies(int64_t rows) { return rows + rows / 2; }

// The memory of the copies of a map: RowCopy copies[max_row_copies(rows)], int32_t parents[rows],
// int32_t readers[rows].
LMD_HOST_DEVICE int64_t row_copy_bytes(int64_t rows) {
  return max_row_copies(rows) * static_cast<int64_t>(sizeof(RowCopy)) +
         rows * 2 * static_cast<int64_t>(sizeof(int32_t));
}

// parents[rows], all in range; readers[r]: how many rows other than r have the parent r,
// overwritten; copies: room for max_row_copies(rows). Returns the number of copies.
LMD_HOST_DEVICE int32_t order_row_copies(const int32_t* parents, int32_t rows, int32_t* readers,
                                         RowCopy* copies) {
  constexpr int32_t kWritten = -1;
  int32_t count = 0;
  for (int32_t row = 0; row < rows; ++row) {
    int32_t free_row = row;
    while (readers[free_row] == 0 && parents[free_row] != free_row) {
      const int32_t from = parents[free_row];
      copies[count++] = {free_row, from};
      readers[free_row] = kWritten;
      --readers[from];
      free_row = from;
    }
  }
  for (int32_t first = 0; first < rows; ++first) {
    if (readers[first] <= 0 || parents[first] == first) continue;
    copies[count++] = {kTemporaryRow, first};
    int32_t row = first;
    while (true) {
      const int32_t from = parents[row];
      readers[row] = kWritten;
      copies[count++] = {row, from == first ? kTemporaryRow : from};
      if (from == first) break;
      row = from;
    }
  }
  return count;
}

// The same where nobody has counted the readers yet; readers[rows]: overwritten.
LMD_HOST_DEVICE int32_t order_row_copies_of(const int32_t* parents, int32_t rows, int32_t* readers,
                                            RowCopy* copies) {
  for (int32_t row = 0; row < rows; ++row) readers[row] = 0;
  bool moves = false;
  for (int32_t row = 0; row < rows; ++row) {
    if (parents[row] == row) continue;
    moves = true;
    ++readers[parents[row]];
  }
  return moves ? order_row_copies(parents, rows, readers, copies) : 0;
}

}  // namespace lmdecode
