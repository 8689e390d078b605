#include "amx_emulation.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace amx_emulation {
namespace {

constexpr int kTiles = 8, kMaxRows = 16, kMaxBytes = 64;

struct Tile {
  int rows = 0, row_bytes = 0;
  unsigned char bytes[kMaxRows][kMaxBytes] = {};
};

struct Registers {
  bool in_use = false;
  Tile tile[kTiles];
};

thread_local Registers registers;

bool vectors_are_allowed = true;

[[noreturn]] void fault(const char* what) {
  std::fprintf(stderr, "amx_emulation: %s\n", what);
  std::abort();
}

Tile& tile_of(int number) {
  if (!registers.in_use) fault("an instruction of tiles without a configuration");
  if (number < 0 || number >= kTiles) fault("no such tile");
  Tile& tile = registers.tile[number];
  if (tile.rows == 0 || tile.row_bytes == 0) fault("a tile without a size");
  return tile;
}

// Rows of c, and the elements of 4 bytes along the depth.
struct Sizes {
  int rows, columns, depth;
};

Sizes sizes_of(const Tile& c, const Tile& a, const Tile& b) {
  if (&c == &a || &c == &b || &a == &b) fault("one tile twice in a product");
  if (a.rows != c.rows || b.row_bytes != c.row_bytes || a.row_bytes != 4 * b.rows) {
    fault("the sizes of the tiles of a product do not fit");
  }
  return {c.rows, c.row_bytes / 4, a.row_bytes / 4};
}

template <class T>
T read(const unsigned char* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

float bfloat16(const unsigned char* from) {
  const uint32_t bits = static_cast<uint32_t>(read<uint16_t>(from)) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

constexpr float kLeastNormal = 0x1p-126f;

float flushed(float value) {
  return std::fabs(value) < kLeastNormal ? std::copysign(0.0f, value) : value;
}

float flushed_sum(float a, float b) { return flushed_multiply_add(a, 1.0f, b); }

// A and B: int8_t or uint8_t.
template <class A, class B>
void multiply_bytes(const Sizes& sizes, Tile& c, const Tile& a, const Tile& b) {
  for (int row = 0; row < sizes.rows; ++row) {
    for (int column = 0; column < sizes.columns; ++column) {
      unsigned char* const to = c.bytes[row] + 4 * column;
      uint32_t sum = read<uint32_t>(to);
      for (int k = 0; k < sizes.depth; ++k) {
        for (int e = 0; e < 4; ++e) {
          const int32_t left = read<A>(a.bytes[row] + 4 * k + e);
          const int32_t right = read<B>(b.bytes[k] + 4 * column + e);
          sum += static_cast<uint32_t>(left * right);
        }
      }
      std::memcpy(to, &sum, sizeof(sum));
    }
  }
}

void multiply_pairs(const Sizes& sizes, Tile& c, const Tile& a, const Tile& b) {
  for (int row = 0; row < sizes.rows; ++row) {
    for (int column = 0; column < sizes.columns; ++column) {
      float chain[2] = {0.0f, 0.0f};
      for (int k = 0; k < sizes.depth; ++k) {
        for (int e = 0; e < 2; ++e) {
          chain[e] = flushed_multiply_add(bfloat16(a.bytes[row] + 4 * k + 2 * e),
                                          bfloat16(b.bytes[k] + 4 * column + 2 * e), chain[e]);
        }
      }
      unsigned char* const to = c.bytes[row] + 4 * column;
      const float sum = flushed_sum(read<float>(to), flushed_sum(chain[0], chain[1]));
      std::memcpy(to, &sum, sizeof(sum));
    }
  }
}

// ---- the same bits sixteen columns at a time, for tests of whole models

#if defined(__x86_64__)
#define AMX_EMULATION_VECTORS __attribute__((target("avx512f,avx512vnni"), noinline))

bool has_vectors() {
  static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vnni");
  return has && vectors_are_allowed;
}

}  // namespace
}  // namespace amx_emulation

// Where all code of that level lies, as tests/test_abi.py has it.
namespace lmdecode::avx512 {
namespace {

using namespace amx_emulation;

// gcc 12 takes the undefined operand inside its shifts without a mask for an uninitialised
// variable. Called with subnormal numbers flushed by the processor. Not inlined: what stands before
// and behind the change of that mode stays there.
AMX_EMULATION_VECTORS void multiply_pairs_flushed(const Sizes& sizes, Tile& c, const Tile& a,
                                                  const Tile& b) {
  const __mmask16 columns = static_cast<__mmask16>((1u << sizes.columns) - 1u);
  const __m512i second = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  for (int row = 0; row < sizes.rows; ++row) {
    __m512 chain[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int k = 0; k < sizes.depth; ++k) {
      const __m512i left = _mm512_set1_epi32(read<int32_t>(a.bytes[row] + 4 * k));
      const __m512i right = _mm512_loadu_si512(b.bytes[k]);
      chain[0] = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xffff, left, 16)),
                                 _mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xffff, right, 16)),
                                 chain[0]);
      chain[1] = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(left, second)),
                                 _mm512_castsi512_ps(_mm512_and_si512(right, second)), chain[1]);
    }
    unsigned char* const to = c.bytes[row];
    const __m512 sum = _mm512_add_ps(_mm512_loadu_ps(to), _mm512_add_ps(chain[0], chain[1]));
    _mm512_mask_storeu_ps(to, columns, sum);
  }
}

// Bytes that have a sign are kSigned: those of b, of a, or both, as products of a + 128.
enum class Signed { kB, kA, kBoth };

template <Signed kSigned>
AMX_EMULATION_VECTORS void multiply_quads(const Sizes& sizes, Tile& c, const Tile& a,
                                          const Tile& b) {
  const __mmask16 columns = static_cast<__mmask16>((1u << sizes.columns) - 1u);
  const __m512i middle = _mm512_set1_epi8(static_cast<char>(0x80));
  for (int row = 0; row < sizes.rows; ++row) {
    unsigned char* const to = c.bytes[row];
    __m512i sum = _mm512_loadu_si512(to), more = _mm512_setzero_si512();
    for (int k = 0; k < sizes.depth; ++k) {
      const __m512i left = _mm512_set1_epi32(read<int32_t>(a.bytes[row] + 4 * k));
      const __m512i right = _mm512_loadu_si512(b.bytes[k]);
      if constexpr (kSigned == Signed::kBoth) {
        sum = _mm512_dpbusd_epi32(sum, _mm512_xor_si512(left, middle), right);
        more = _mm512_dpbusd_epi32(more, middle, right);
      } else {
        sum = kSigned == Signed::kB ? _mm512_dpbusd_epi32(sum, left, right)
                                    : _mm512_dpbusd_epi32(sum, right, left);
      }
    }
    _mm512_mask_storeu_epi32(to, columns, _mm512_sub_epi32(sum, more));
  }
}

}  // namespace
}  // namespace lmdecode::avx512

namespace amx_emulation {
namespace {

using lmdecode::avx512::multiply_pairs_flushed;
using lmdecode::avx512::multiply_quads;
using lmdecode::avx512::Signed;

void multiply_pairs_by_vectors(const Sizes& sizes, Tile& c, const Tile& a, const Tile& b) {
  constexpr unsigned kFlush = 0x8040u, kMasked = 0x1f80u;  // nearest even, no exception stops
  const unsigned before = _mm_getcsr();
  _mm_setcsr(kFlush | kMasked);
  multiply_pairs_flushed(sizes, c, a, b);
  _mm_setcsr(before);
}
#else
bool has_vectors() { return false; }
enum class Signed { kB, kA, kBoth };
template <Signed>
void multiply_quads(const Sizes&, Tile&, const Tile&, const Tile&) {}
void multiply_pairs_by_vectors(const Sizes&, Tile&, const Tile&, const Tile&) {}
#endif

using Product = void (*)(const Sizes& sizes, Tile& c, const Tile& a, const Tile& b);

void multiply(int c_number, int a_number, int b_number, Product product) {
  Tile& c = tile_of(c_number);
  const Tile &a = tile_of(a_number), &b = tile_of(b_number);
  product(sizes_of(c, a, b), c, a, b);
}

}  // namespace

float flushed_multiply_add(float a, float b, float c) {
  a = flushed(a);
  b = flushed(b);
  c = flushed(c);
  const float result = std::fma(a, b, c);
  if (!(std::fabs(result) <= kLeastNormal) || result == 0.0f) return result;
  // Here the sum is exact in double precision, as far as it tells on which side of the limit it is:
  // what rounds to 24 bits below 2^-126 is subnormal, although rounded to multiples of 2^-149 it
  // may be 2^-126.
  const double exact = static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(c);
  return std::fabs(exact) < 0x1p-126 - 0x1p-151 ? std::copysign(0.0f, result) : result;
}

void allow_vectors(bool allowed) { vectors_are_allowed = allowed; }

void load_config(const void* config) {
  const unsigned char* const bytes = static_cast<const unsigned char*>(config);
  if (bytes[0] != 1) fault("a configuration of another palette than 1");
  for (int i = 1; i < 16; ++i) {
    if (bytes[i] != 0) fault("reserved bytes of a configuration are not 0");
  }
  registers = {};
  registers.in_use = true;
  for (int t = 0; t < 16; ++t) {
    const int row_bytes = read<uint16_t>(bytes + 16 + 2 * t), rows = bytes[48 + t];
    if (t >= kTiles && (row_bytes != 0 || rows != 0)) fault("a configuration of more than 8 tiles");
    if (rows > kMaxRows || row_bytes > kMaxBytes || (rows == 0) != (row_bytes == 0)) {
      fault("a tile of a wrong size");
    }
    if (t >= kTiles) continue;
    registers.tile[t].rows = rows;
    registers.tile[t].row_bytes = row_bytes;
  }
}

void release() { registers = {}; }

bool in_use() { return registers.in_use; }

void zero(int number) {
  Tile& tile = tile_of(number);
  std::memset(tile.bytes, 0, sizeof(tile.bytes));
}

void load(int number, const void* rows, int64_t row_stride) {
  Tile& tile = tile_of(number);
  std::memset(tile.bytes, 0, sizeof(tile.bytes));
  for (int row = 0; row < tile.rows; ++row) {
    std::memcpy(tile.bytes[row], static_cast<const char*>(rows) + row * row_stride,
                static_cast<std::size_t>(tile.row_bytes));
  }
}

void store(int number, void* rows, int64_t row_stride) {
  const Tile& tile = tile_of(number);
  for (int row = 0; row < tile.rows; ++row) {
    std::memcpy(static_cast<char*>(rows) + row * row_stride, tile.bytes[row],
                static_cast<std::size_t>(tile.row_bytes));
  }
}

void dpbf16ps(int c, int a, int b) {
  multiply(c, a, b, has_vectors() ? &multiply_pairs_by_vectors : &multiply_pairs);
}

void dpbusd(int c, int a, int b) {
  multiply(c, a, b, has_vectors() ? &multiply_quads<Signed::kB> : &multiply_bytes<uint8_t, int8_t>);
}

void dpbsud(int c, int a, int b) {
  multiply(c, a, b, has_vectors() ? &multiply_quads<Signed::kA> : &multiply_bytes<int8_t, uint8_t>);
}

void dpbssd(int c, int a, int b) {
  multiply(c, a, b,
           has_vectors() ? &multiply_quads<Signed::kBoth> : &multiply_bytes<int8_t, int8_t>);
}

}  // namespace amx_emulation
