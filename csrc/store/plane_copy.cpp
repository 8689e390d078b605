#include "store/plane_copy.h"

#include <algorithm>
#include <cstring>

namespace lmdecode::store {

namespace {

constexpr int64_t kTile = 16;  // of a transposing copy: 16 rows of 16 elements stay in the L1 cache

// rows x columns elements; what runs are made of is a row.
void copy_rows(char* target, int64_t target_row, const char* source, int64_t source_row,
               int64_t rows, int64_t row_bytes) {
  if (target_row == row_bytes && source_row == row_bytes) {
    std::memcpy(target, source, static_cast<size_t>(rows * row_bytes));
    return;
  }
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(target + row * target_row, source + row * source_row,
                static_cast<size_t>(row_bytes));
  }
}

template <int64_t kSize>
void copy_elements(char* target, const PlaneStrides& to, const char* source,
                   const PlaneStrides& from, int64_t tokens, int64_t elements) {
  for (int64_t first = 0; first < tokens; first += kTile) {
    const int64_t last = std::min(tokens, first + kTile);
    for (int64_t begin = 0; begin < elements; begin += kTile) {
      const int64_t end = std::min(elements, begin + kTile);
      for (int64_t token = first; token < last; ++token) {
        for (int64_t element = begin; element < end; ++element) {
          std::memcpy(target + token * to.token + element * to.element,
                      source + token * from.token + element * from.element, kSize);
        }
      }
    }
  }
}

}  // namespace

void copy_plane(char* target, const PlaneStrides& to, const char* source, const PlaneStrides& from,
                int64_t heads, int64_t tokens, int64_t elements, int64_t element_size) {
  if (tokens == 0) return;
  for (int64_t head = 0; head < heads; ++head) {
    char* out = target + head * to.head;
    const char* in = source + head * from.head;
    if (to.element == element_size && from.element == element_size) {
      copy_rows(out, to.token, in, from.token, tokens, elements * element_size);
    } else if (to.token == element_size && from.token == element_size) {
      copy_rows(out, to.element, in, from.element, elements, tokens * element_size);
    } else if (element_size == 1) {
      copy_elements<1>(out, to, in, from, tokens, elements);
    } else if (element_size == 2) {
      copy_elements<2>(out, to, in, from, tokens, elements);
    } else if (element_size == 4) {
      copy_elements<4>(out, to, in, from, tokens, elements);
    } else {
      copy_elements<8>(out, to, in, from, tokens, elements);
    }
  }
}

}  // namespace lmdecode::store
