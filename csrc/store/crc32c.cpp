#include "store/crc32c.h"

#include <array>
#include <cstring>

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

// Bytes of one of the three streams: long ones for bulk, short ones for what is left.
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

Crc32c crc32c_accelerated() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul")) return crc32c_sse42;
#endif
  return nullptr;
}

uint32_t crc32c(const void* data, size_t size, uint32_t crc) {
  static const Crc32c function = [] {
    const Crc32c accelerated = crc32c_accelerated();
    return accelerated != nullptr ? accelerated : crc32c_portable;
  }();
  return function(data, size, crc);
}

}  // namespace lmdecode::store
