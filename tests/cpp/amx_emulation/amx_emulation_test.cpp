// The emulated tiles against the processor's arithmetic, sums written out, and real tiles if any.
#include "amx_emulation.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>

#include "check.h"
#include "simd/cpu_capability.h"
#if defined(__x86_64__)
#include <immintrin.h>

#include "simd/matrix_tiles.h"
#endif

namespace lmdecode {
namespace {

float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

bool same(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) || bits_of_float(a) == bits_of_float(b);
}

// Numbers of every kind: of any exponent, subnormal, around the least normal, infinite, NaN.
class Numbers {
 public:
  explicit Numbers(unsigned seed) : random_(seed) {}

  uint16_t bfloat16(bool is_usual) {
    const uint32_t bits = static_cast<uint32_t>(random_());
    const uint32_t sign = bits & 0x8000u, mantissa = bits >> 16 & 0x7fu;
    const uint32_t kind = is_usual ? 0 : bits >> 24 & 15u;
    const uint32_t exponent = kind < 8    ? 120 + (bits & 15u)
                              : kind < 10 ? bits & 255u
                              : kind < 12 ? 0
                              : kind < 14 ? 55 + (bits & 15u)  // products near 2^-126
                              : kind < 15 ? 1 + (bits & 1u)
                                          : 255;
    return static_cast<uint16_t>(sign | exponent << 7 | (kind == 15 && bits & 64u ? 0 : mantissa));
  }
  float wide() {
    const uint32_t bits = static_cast<uint32_t>(random_());
    const uint32_t low = static_cast<uint32_t>(random_()) & 0xffffu;
    return float_of_bits(static_cast<uint32_t>(bfloat16(bits & 1u)) << 16 | (bits & 2u ? low : 0));
  }
  uint32_t word() { return static_cast<uint32_t>(random_()); }

 private:
  std::mt19937 random_;
};

#if defined(__x86_64__)
__attribute__((target("fma"))) float processor_multiply_add(float a, float b, float c) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040u);  // results and factors that are subnormal are 0
  volatile float result = _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(c)));
  _mm_setcsr(before);
  return result;
}

TEST(additions_are_those_of_a_processor_that_flushes) {
  if (!__builtin_cpu_supports("fma")) return;
  Numbers numbers(1);
  const auto check = [&](float a, float b, float c) {
    const float want = processor_multiply_add(a, b, c);
    CHECK(same(amx_emulation::flushed_multiply_add(a, b, c), want));
  };
  for (int i = 0; i < 1000000; ++i) {
    const float a = float_of_bits(static_cast<uint32_t>(numbers.bfloat16(i % 2 == 0)) << 16);
    const float b = float_of_bits(static_cast<uint32_t>(numbers.bfloat16(i % 4 < 2)) << 16);
    check(a, b, numbers.wide());
    check(a, 1.0f, numbers.wide());
    check(numbers.wide(), 1.0f, numbers.wide());
  }
  // Sums about the least normal number, less some 2^-150.
  for (int i = 1; i < 4096; ++i) {
    const float small = std::ldexp(static_cast<float>(i % 128 + 128), -80 - i / 256);
    for (const float sign : {1.0f, -1.0f}) {
      check(small, sign * 0x1p-77f, 0x1p-126f);
      check(small, sign * 0x1p-77f, -0x1p-126f);
      check(small, sign * 0x1p-70f, float_of_bits(0x00800001u));
      check(small, sign * 0x1p-56f, float_of_bits(0x80800000u + static_cast<uint32_t>(i)));
    }
  }
}
#endif

struct Matrix {
  alignas(64) std::array<uint8_t, 1024> bytes;
};

// A product of tiles of a random size: c [rows, columns], a [rows, 4 depth bytes].
struct Product {
  int rows, columns, depth;
  Matrix a, b, c;

  Product(Numbers* numbers, bool is_float) {
    rows = static_cast<int>(numbers->word() % 16) + 1;
    columns = static_cast<int>(numbers->word() % 16) + 1;
    depth = static_cast<int>(numbers->word() % 16) + 1;
    const bool is_usual = numbers->word() % 4 != 0;
    for (Matrix* matrix : {&a, &b, &c}) {
      for (size_t i = 0; i < 1024; i += 4) {
        uint32_t word = numbers->word();
        if (is_float && matrix == &c) {
          word = bits_of_float(numbers->wide());
        } else if (is_float) {
          word = static_cast<uint32_t>(numbers->bfloat16(is_usual)) |
                 static_cast<uint32_t>(numbers->bfloat16(is_usual)) << 16;
        }
        std::memcpy(&matrix->bytes[i], &word, 4);
      }
    }
  }

  using Config = std::array<uint8_t, 64>;
  Config config() const {
    alignas(64) Config bytes = {1};
    const int sizes[3][2] = {{rows, 4 * columns}, {rows, 4 * depth}, {depth, 4 * columns}};
    for (size_t tile = 0; tile < 3; ++tile) {
      bytes[48 + tile] = static_cast<uint8_t>(sizes[tile][0]);
      bytes[16 + 2 * tile] = static_cast<uint8_t>(sizes[tile][1]);
    }
    return bytes;
  }

  Matrix emulated(void (*multiply)(int, int, int)) const {
    amx_emulation::load_config(config().data());
    amx_emulation::load(0, c.bytes.data(), 64);
    amx_emulation::load(1, a.bytes.data(), 64);
    amx_emulation::load(2, b.bytes.data(), 64);
    multiply(0, 1, 2);
    Matrix result = c;
    amx_emulation::store(0, result.bytes.data(), 64);
    amx_emulation::release();
    return result;
  }
};

// Products by vectors where the machine has them, then one number at a time.
template <class Check>
void with_and_without_vectors(const Check& check) {
  for (const bool allowed : {true, false}) {
    amx_emulation::allow_vectors(allowed);
    check();
  }
  amx_emulation::allow_vectors(true);
}

void check_sums_of_bytes(const Product& p) {
  const Matrix results[3] = {p.emulated(&amx_emulation::dpbusd), p.emulated(&amx_emulation::dpbsud),
                             p.emulated(&amx_emulation::dpbssd)};
  for (int row = 0; row < p.rows; ++row) {
    for (int column = 0; column < p.columns; ++column) {
      const size_t at = static_cast<size_t>(64 * row + 4 * column);
      int32_t c = 0;
      std::memcpy(&c, &p.c.bytes[at], 4);
      int64_t want[3] = {c, c, c};
      for (int e = 0; e < 4 * p.depth; ++e) {
        const uint8_t a = p.a.bytes[static_cast<size_t>(64 * row + e)];
        const uint8_t b = p.b.bytes[static_cast<size_t>(64 * (e / 4) + 4 * column + e % 4)];
        want[0] += a * static_cast<int8_t>(b);
        want[1] += static_cast<int8_t>(a) * b;
        want[2] += static_cast<int8_t>(a) * static_cast<int8_t>(b);
      }
      for (int kind = 0; kind < 3; ++kind) {
        int32_t got = 0;
        std::memcpy(&got, &results[kind].bytes[at], 4);
        CHECK_EQ(got, static_cast<int32_t>(want[kind]));
      }
    }
  }
}

TEST(products_of_bytes_are_sums) {
  with_and_without_vectors([] {
    Numbers numbers(2);
    for (int i = 0; i < 200; ++i) check_sums_of_bytes(Product(&numbers, false));
  });
}

void check_order_of_the_manual(const Product& p) {
  const Matrix result = p.emulated(&amx_emulation::dpbf16ps);
  const auto element = [](const Matrix& matrix, int row, int number) {
    uint16_t bits = 0;
    std::memcpy(&bits, &matrix.bytes[static_cast<size_t>(64 * row + 2 * number)], 2);
    return float_of_bits(static_cast<uint32_t>(bits) << 16);
  };
  const auto add = &amx_emulation::flushed_multiply_add;
  for (int row = 0; row < p.rows; ++row) {
    for (int column = 0; column < p.columns; ++column) {
      float chain[2] = {0.0f, 0.0f}, c = 0.0f, got = 0.0f;
      for (int e = 0; e < 2 * p.depth; ++e) {
        chain[e % 2] =
            add(element(p.a, row, e), element(p.b, e / 2, 2 * column + e % 2), chain[e % 2]);
      }
      const size_t at = static_cast<size_t>(64 * row + 4 * column);
      std::memcpy(&c, &p.c.bytes[at], 4);
      std::memcpy(&got, &result.bytes[at], 4);
      CHECK(same(got, add(c, 1.0f, add(chain[0], 1.0f, chain[1]))));
    }
  }
}

TEST(products_of_pairs_have_the_order_of_the_manual) {
  with_and_without_vectors([] {
    Numbers numbers(4);
    for (int i = 0; i < 300; ++i) check_order_of_the_manual(Product(&numbers, true));
  });
}

TEST(sums_that_are_subnormal_are_0) {
  with_and_without_vectors([] {
    Numbers numbers(5);
    Product p(&numbers, true);
    p.rows = p.columns = p.depth = 1;
    // 2^-63 * -2^-63 + 0 * 0, added to 1.5 * 2^-126.
    const uint32_t a = 0x2000u, b = 0xa000u, c = 0x00c00000u;
    std::memcpy(p.a.bytes.data(), &a, 4);
    std::memcpy(p.b.bytes.data(), &b, 4);
    std::memcpy(p.c.bytes.data(), &c, 4);
    const Matrix result = p.emulated(&amx_emulation::dpbf16ps);
    uint32_t got = 1;
    std::memcpy(&got, result.bytes.data(), 4);
    CHECK_EQ(got, 0u);
  });
}

TEST(products_of_pairs_are_close_to_sums_in_double_precision) {
  Numbers numbers(3);
  for (int i = 0; i < 50; ++i) {
    Product p(&numbers, true);
    for (Matrix* matrix : {&p.a, &p.b}) {
      for (size_t at = 1; at < 1024; at += 2) {  // exponents about 1
        matrix->bytes[at] = static_cast<uint8_t>((matrix->bytes[at] & 0x80u) | 0x3fu);
      }
    }
    p.c.bytes = {};
    const Matrix result = p.emulated(&amx_emulation::dpbf16ps);
    for (int row = 0; row < p.rows; ++row) {
      for (int column = 0; column < p.columns; ++column) {
        double want = 0.0, size = 0.0;
        for (int e = 0; e < 2 * p.depth; ++e) {
          uint16_t a = 0, b = 0;
          std::memcpy(&a, &p.a.bytes[static_cast<size_t>(64 * row + 2 * e)], 2);
          std::memcpy(&b, &p.b.bytes[static_cast<size_t>(64 * (e / 2) + 4 * column + e % 2 * 2)],
                      2);
          const double product =
              static_cast<double>(float_of_bits(static_cast<uint32_t>(a) << 16)) *
              static_cast<double>(float_of_bits(static_cast<uint32_t>(b) << 16));
          want += product;
          size += std::fabs(product);
        }
        float got;
        std::memcpy(&got, &result.bytes[static_cast<size_t>(64 * row + 4 * column)], 4);
        CHECK(std::fabs(static_cast<double>(got) - want) < 1e-6 * size);
      }
    }
  }
}

#if defined(__x86_64__)
TEST(the_processor_gives_the_same_bits) {
  if (max_cpu_capability() != CpuCapability::kAmx) {
    std::printf("       (not run: this machine has no tiles)\n");
    return;
  }
  using namespace hardware;
  // Each product has up to 16 * 16 sums of 32 products.
  for (int i = 0; i < 30000; ++i) {
    Numbers numbers(static_cast<unsigned>(i));
    const int kind = i % 4;
    const Product p(&numbers, kind == 0);
    TileConfig config;
    const auto bytes = p.config();
    std::memcpy(&config, bytes.data(), sizeof(config));
    Matrix got = p.c;
    {
      const TileScope scope(config);
      load_tile<0>(p.c.bytes.data(), 64);
      load_tile<1>(p.a.bytes.data(), 64);
      load_tile<2>(p.b.bytes.data(), 64);
      if (kind == 0) multiply_bfloat16<0, 1, 2>();
      if (kind == 1) multiply_int8<0, 1, 2>();
      if (kind == 2) multiply_codes<0, 1, 2>();
      if (kind == 3) multiply_numbers<0, 1, 2>();
      store_tile<0>(got.bytes.data(), 64);
    }
    const Matrix want = p.emulated(kind == 0   ? &amx_emulation::dpbf16ps
                                   : kind == 1 ? &amx_emulation::dpbusd
                                   : kind == 2 ? &amx_emulation::dpbsud
                                               : &amx_emulation::dpbssd);
    for (size_t at = 0; at < 1024; at += 4) {
      float a, b;
      std::memcpy(&a, &got.bytes[at], 4);
      std::memcpy(&b, &want.bytes[at], 4);
      CHECK(kind == 0 ? same(a, b) : bits_of_float(a) == bits_of_float(b));
    }
  }
}
#endif

}  // namespace
}  // namespace lmdecode

CHECK_MAIN()
