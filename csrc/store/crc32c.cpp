#include "store/crc32c.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lmdecode::store {

namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected

constexpr std::array<std::array<uint32_t, 256>, 8> make_tables() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (uint32_t byte = 0; byte < 256; ++byte) {
    for (int i = 1; i < 8; ++i) {
      const uint32_t before = tables[i - 1][byte];
      tables[i][byte] = before >> 8 ^ tables[0][before & 255];
    }
  }
  return tables;
}
constexpr auto kTables = make_tables();

#if defined(__x86_64__)

// Bytes of one of the three streams: long ones for bulk, short ones for the rest.
constexpr size_t kLong = 4096, kShort = 256;

// x^bits modulo the polynomial, reflected: the bit of x^0 is the highest.
constexpr uint32_t power_of_x(uint64_t bits) {
  uint32_t value = uint32_t{1} << 31;
  for (uint64_t i = 0; i < bits; ++i) value = value >> 1 ^ (value & 1 ? kPolynomial : 0);
  return value;
}

// A carry-less product of two reflected 32-bit values is 63 bits long and lies one bit low; the
// crc32 instruction that reduces it multiplies by x^32. Hence 33 powers less than 8 n.
constexpr uint32_t shift_constant(size_t bytes) { return power_of_x(8 * bytes - 33); }
constexpr uint32_t kShiftLong = shift_constant(kLong), kShiftLong2 = shift_constant(2 * kLong);
constexpr uint32_t kShiftShort = shift_constant(kShort), kShiftShort2 = shift_constant(2 * kShort);

#define LMD_CRC_TARGET __attribute__((target("sse4.2,pclmul")))

LMD_CRC_TARGET uint64_t shifted(uint64_t crc, uint32_t constant) {
  const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<int64_t>(crc)),
                                               _mm_cvtsi32_si128(static_cast<int>(constant)), 0);
  return _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(product)));
}

LMD_CRC_TARGET uint64_t word(const uint8_t* p) {
  uint64_t value;
  std::memcpy(&value, p, 8);
  return value;
}

template <size_t kStream>
LMD_CRC_TARGET uint64_t three_streams(const uint8_t* p, uint64_t crc, uint32_t once,
                                      uint32_t twice) {
  uint64_t b = 0, c = 0;
  for (size_t i = 0; i < kStream; i += 8) {
    crc = _mm_crc32_u64(crc, word(p + i));
    b = _mm_crc32_u64(b, word(p + kStream + i));
    c = _mm_crc32_u64(c, word(p + 2 * kStream + i));
  }
  return shifted(crc, twice) ^ shifted(b, once) ^ c;
}

LMD_CRC_TARGET uint32_t crc32c_sse42(const void* data, size_t size, uint32_t start) {
  const uint8_t* p = static_cast<const uint8_t*>(data);
  uint64_t crc = ~start;
  for (; size >= 3 * kLong; p += 3 * kLong, size -= 3 * kLong) {
    crc = three_streams<kLong>(p, crc, kShiftLong, kShiftLong2);
  }
  for (; size >= 3 * kShort; p += 3 * kShort, size -= 3 * kShort) {
    crc = three_streams<kShort>(p, crc, kShiftShort, kShiftShort2);
  }
  for (; size >= 8; p += 8, size -= 8) crc = _mm_crc32_u64(crc, word(p));
  for (; size > 0; ++p, --size) crc = _mm_crc32_u8(static_cast<uint32_t>(crc), *p);
  return ~static_cast<uint32_t>(crc);
}

// Folding: 256 bytes at a time in four registers of four 128-bit blocks, each multiplied by what
// carries it to where the next 256 bytes begin ("Fast CRC computation using PCLMULQDQ", Intel
// 2009). The bytes pass through registers, so that a copy costs only its stores.
constexpr size_t kFold = 256;

// A block is two reflected 64-bit halves; the product of two of them lies one bit low, which the
// power one less makes good.
constexpr int64_t fold_constant(uint64_t bits) {
  return static_cast<int64_t>(uint64_t{power_of_x(bits - 1)} << 32);
}
constexpr int64_t kFold128 = fold_constant(128), kFold192 = fold_constant(192);
constexpr int64_t kFold512 = fold_constant(512), kFold576 = fold_constant(576);
constexpr int64_t kFold2048 = fold_constant(2048), kFold2112 = fold_constant(2112);

#define LMD_FOLD_TARGET __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.2")))

LMD_FOLD_TARGET __m512i folded(__m512i block, __m512i by, __m512i next) {
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(block, by, 0x00),
                                   _mm512_clmulepi64_epi128(block, by, 0x11), next, 0x96);
}

LMD_FOLD_TARGET __m128i folded(__m128i block, __m128i next) {
  const __m128i by = _mm_set_epi64x(kFold128, kFold192);
  return _mm_xor_si128(
      _mm_xor_si128(_mm_clmulepi64_si128(block, by, 0x00), _mm_clmulepi64_si128(block, by, 0x11)),
      next);
}

enum class Store { kNone, kCached, kStreamed };

template <Store kStore>
LMD_FOLD_TARGET void store(char* target, __m512i value) {
  if constexpr (kStore == Store::kCached) _mm512_storeu_si512(target, value);
  if constexpr (kStore == Store::kStreamed) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target), value);
  }
}

// Where a copy goes, line by line.
constexpr size_t kLine = 64;

struct Straight {
  char* at;
  char* line() { return std::exchange(at, at + kLine); }
};

struct Rows {
  char* at;
  size_t row_bytes, left;  // left: of this row
  ptrdiff_t gap;
  char* line() {
    if (left == 0) {
      at += gap;
      left = row_bytes;
    }
    left -= kLine;
    return std::exchange(at, at + kLine);
  }
};

// At least kFold bytes; a streamed target is aligned to 64. The rest goes the short way.
template <Store kStore, class Target>
LMD_FOLD_TARGET uint32_t fold(Target target, const char* source, size_t size, uint32_t start) {
  const auto take = [&](size_t at) LMD_FOLD_TARGET {
    const __m512i block = _mm512_loadu_si512(source + at);
    if constexpr (kStore != Store::kNone) store<kStore>(target.line(), block);
    return block;
  };
  // Not an array: the compiler would keep it in memory, beside the copy.
  __m512i a = take(0), b = take(64), c = take(128), d = take(192);
  a = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(~start))));
  const __m512i far = _mm512_set4_epi64(kFold2048, kFold2112, kFold2048, kFold2112);
  size_t at = kFold;
  for (; at + kFold <= size; at += kFold) {
    a = folded(a, far, take(at));
    b = folded(b, far, take(at + 64));
    c = folded(c, far, take(at + 128));
    d = folded(d, far, take(at + 192));
  }
  const __m512i near = _mm512_set4_epi64(kFold512, kFold576, kFold512, kFold576);
  const __m512i all = folded(folded(folded(a, near, b), near, c), near, d);
  __m128i block = _mm512_castsi512_si128(all);
  block = folded(block, _mm512_extracti32x4_epi32(all, 1));
  block = folded(block, _mm512_extracti32x4_epi32(all, 2));
  block = folded(block, _mm512_extracti32x4_epi32(all, 3));
  uint64_t crc = _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(block)));
  crc = _mm_crc32_u64(crc, static_cast<uint64_t>(_mm_extract_epi64(block, 1)));
  uint32_t sum = ~static_cast<uint32_t>(crc);
  if constexpr (kStore == Store::kNone) return crc32c_sse42(source + at, size - at, sum);
  for (size_t part; at < size; at += part) {
    part = std::min(kLine, size - at);
    char* copied = target.line();
    std::memcpy(copied, source + at, part);
    sum = crc32c_sse42(copied, part, sum);
  }
  return sum;
}

uint32_t crc32c_folded(const void* data, size_t size, uint32_t start) {
  if (size < kFold) return crc32c_sse42(data, size, start);
  return fold<Store::kNone>(Straight{}, static_cast<const char*>(data), size, start);
}

template <class Target>
uint32_t folded_copy(const Target& target, const void* source, size_t size, uint32_t crc,
                     bool streamed) {
  const char* in = static_cast<const char*>(source);
  return streamed ? fold<Store::kStreamed>(target, in, size, crc)
                  : fold<Store::kCached>(target, in, size, crc);
}

bool can_fold() {
  static const bool can = __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("vpclmulqdq") &&
                          __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
  return can;
}

#endif

}  // namespace

uint32_t crc32c_portable(const void* data, size_t size, uint32_t crc) {
  const uint8_t* p = static_cast<const uint8_t*>(data);
  crc = ~crc;
  for (; size >= 8; p += 8, size -= 8) {
    crc ^= uint32_t{p[0]} | uint32_t{p[1]} << 8 | uint32_t{p[2]} << 16 | uint32_t{p[3]} << 24;
    crc = kTables[7][crc & 255] ^ kTables[6][crc >> 8 & 255] ^ kTables[5][crc >> 16 & 255] ^
          kTables[4][crc >> 24] ^ kTables[3][p[4]] ^ kTables[2][p[5]] ^ kTables[1][p[6]] ^
          kTables[0][p[7]];
  }
  for (; size > 0; ++p, --size) crc = crc >> 8 ^ kTables[0][(crc ^ *p) & 255];
  return ~crc;
}

std::vector<Crc32c> crc32c_accelerated() {
  std::vector<Crc32c> found;
#if defined(__x86_64__)
  if (can_fold()) found.push_back(crc32c_folded);
  if (__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul")) {
    found.push_back(crc32c_sse42);
  }
#endif
  return found;
}

uint32_t crc32c(const void* data, size_t size, uint32_t crc) {
  static const Crc32c function = [] {
    const std::vector<Crc32c> accelerated = crc32c_accelerated();
    return accelerated.empty() ? crc32c_portable : accelerated.front();
  }();
  return function(data, size, crc);
}

uint32_t copy_crc32c(void* target, const void* source, size_t size, uint32_t crc,
                     [[maybe_unused]] bool streamed) {
#if defined(__x86_64__)
  if (size >= kFold && can_fold()) {
    const bool is_aligned = reinterpret_cast<uintptr_t>(target) % kLine == 0;
    return folded_copy(Straight{static_cast<char*>(target)}, source, size, crc,
                       streamed && is_aligned);
  }
#endif
  std::memcpy(target, source, size);
  return crc32c(target, size, crc);
}

bool can_copy_rows([[maybe_unused]] size_t row_bytes) {
#if defined(__x86_64__)
  return row_bytes > 0 && row_bytes % kLine == 0 && can_fold();
#else
  return false;
#endif
}

uint32_t copy_rows_crc32c(void* target, size_t row_bytes, ptrdiff_t target_stride,
                          const void* source, size_t size, uint32_t crc,
                          [[maybe_unused]] bool streamed) {
  char* out = static_cast<char*>(target);
#if defined(__x86_64__)
  if (size >= kFold) {
    const auto bits = reinterpret_cast<uintptr_t>(out) | static_cast<uintptr_t>(target_stride);
    const Rows rows{out, row_bytes, row_bytes, target_stride - static_cast<ptrdiff_t>(row_bytes)};
    return folded_copy(rows, source, size, crc, streamed && bits % kLine == 0);
  }
#endif
  const char* in = static_cast<const char*>(source);
  for (size_t at = 0; at < size; at += row_bytes, out += target_stride) {
    crc = copy_crc32c(out, in + at, row_bytes, crc, streamed);
  }
  return crc;
}

}  // namespace lmdecode::store
