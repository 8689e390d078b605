// Row copies carried out on the host.
#pragma once

#include <cstring>

#include "common/row_copies.h"

namespace lmdecode {

// Carries out copies of the first `length` elements of rows that begin `stride` apart; temporary:
// room for as many.
template <class T>
void copy_rows(const RowCopy* copies, int32_t count, T* rows, int64_t stride, T* temporary,
               int64_t length) {
  const auto row = [&](int32_t r) { return r == kTemporaryRow ? temporary : rows + r * stride; };
  const size_t bytes = static_cast<size_t>(length) * sizeof(T);
  for (int32_t i = 0; i < count; ++i) {
    std::memcpy(row(copies[i].to), row(copies[i].from), bytes);
  }
}

}  // namespace lmdecode
