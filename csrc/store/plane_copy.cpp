#include "store/plane_copy.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "store/crc32c.h"

namespace lmdecode::store {

namespace {

constexpr int64_t kTile = 16;  // of a transposing copy: 16 rows of 16 elements stay in the L1 cache

// Rows that are shorter are cheaper checked with all others than each by itself.
constexpr int64_t kMinCheckedRow = 1024;

#if defined(__SSE2__)
// 16 bytes at a time; the caches combine four to a line.
void copy_streamed(char* target, const char* source, int64_t size) {
  for (int64_t at = 0; at < size; at += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(target + at),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + at)));
  }
}
bool can_stream(const char* target, int64_t row_stride, int64_t row_bytes) {
  const auto bits = reinterpret_cast<uintptr_t>(target) | static_cast<uintptr_t>(row_stride) |
                    static_cast<uintptr_t>(row_bytes);
  return bits % 64 == 0;  // whole lines: parts of one would each go to memory
}
#endif

// The rows of a head: where they lie in the two, and how long they are.
struct Rows {
  int64_t count, bytes, target_stride, source_stride;

  Rows(const PlaneStrides& to, const PlaneStrides& from, int64_t tokens, int64_t elements,
       int64_t element_size) {
    if (to.element == element_size && from.element == element_size) {
      *this = Rows(tokens, elements * element_size, to.token, from.token);
    } else if (to.token == element_size && from.token == element_size) {
      *this = Rows(elements, tokens * element_size, to.element, from.element);
    } else {
      *this = Rows(0, 0, 0, 0);  // there are none: elements lie in another order
    }
  }

 private:
  Rows(int64_t count, int64_t bytes, int64_t target_stride, int64_t source_stride)
      : count(count), bytes(bytes), target_stride(target_stride), source_stride(source_stride) {
    if (target_stride == bytes && source_stride == bytes && count > 1) {
      *this = Rows(1, count * bytes, count * bytes, count * bytes);
    }
  }
};

void copy_rows(char* target, const char* source, const Rows& rows, bool streamed) {
#if defined(__SSE2__)
  if (streamed && can_stream(target, rows.target_stride, rows.bytes)) {
    for (int64_t row = 0; row < rows.count; ++row) {
      copy_streamed(target + row * rows.target_stride, source + row * rows.source_stride,
                    rows.bytes);
    }
    return;
  }
#endif
  for (int64_t row = 0; row < rows.count; ++row) {
    std::memcpy(target + row * rows.target_stride, source + row * rows.source_stride,
                static_cast<size_t>(rows.bytes));
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
                int64_t heads, int64_t tokens, int64_t elements, int64_t element_size,
                [[maybe_unused]] bool streamed) {
  if (tokens == 0) return;
  const Rows rows(to, from, tokens, elements, element_size);
  for (int64_t head = 0; head < heads; ++head) {
    char* out = target + head * to.head;
    const char* in = source + head * from.head;
    if (rows.count > 0) {
      copy_rows(out, in, rows, streamed);
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

uint32_t copy_plane_crc32c(char* target, const PlaneStrides& to, const char* source,
                           const PlaneStrides& from, int64_t heads, int64_t tokens,
                           int64_t elements, int64_t element_size, bool streamed, char* staging) {
  const Rows rows(to, from, tokens, elements, element_size);
  const auto row_bytes = static_cast<size_t>(rows.bytes);
  const bool are_side_by_side = rows.source_stride == rows.bytes;
  uint32_t crc = 0;
  if (rows.bytes >= kMinCheckedRow) {
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t row = 0; row < rows.count; ++row) {
        crc = copy_crc32c(target + head * to.head + row * rows.target_stride,
                          source + head * from.head + row * rows.source_stride, row_bytes, crc,
                          streamed);
      }
    }
    return crc;
  }
  if (are_side_by_side && can_copy_rows(row_bytes)) {
    for (int64_t head = 0; head < heads; ++head) {
      crc = copy_rows_crc32c(target + head * to.head, row_bytes, rows.target_stride,
                             source + head * from.head, row_bytes * static_cast<size_t>(rows.count),
                             crc, streamed);
    }
    return crc;
  }
  const auto bytes = static_cast<size_t>(heads * tokens * elements * element_size);
  if (staging == nullptr) {
    crc = crc32c(source, bytes, 0);
  } else {
    crc = copy_crc32c(staging, source, bytes, 0, false);
    source = staging;
  }
  copy_plane(target, to, source, from, heads, tokens, elements, element_size, streamed);
  return crc;
}

void finish_streamed_copies() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace lmdecode::store
