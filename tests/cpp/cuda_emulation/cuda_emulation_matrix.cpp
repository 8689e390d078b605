#include <cmath>
#include <cstring>

#include "common/half.h"
#include "cuda_emulation.h"
#include "race_checker.h"

namespace lmdecode::emulation {

std::uint16_t bf16_of(float value) {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
  if (value != value) return 0x7fff;
  return std::uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

std::uint16_t f16_of(float value) {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
  const std::uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (value != value) return 0x7fff;
  if (magnitude >= 0x477ff000u) return std::uint16_t(sign | 0x7c00u);  // from 65520 on
  if (magnitude < 0x38800000u) {                                       // below the normal ones
    const float units = std::fabs(value) * 0x1p24f;
    return std::uint16_t(sign | std::uint32_t(std::nearbyint(units)));
  }
  return std::uint16_t(sign | ((magnitude + 0xfffu + (magnitude >> 13 & 1u)) - 0x38000000u) >> 13);
}

static std::uint64_t resolve_addresses(const std::uint64_t* values, std::uint64_t argument,
                                       unsigned) {
  std::memcpy(reinterpret_cast<void*>(argument), values, 32 * sizeof(std::uint64_t));
  return 0;
}

// Each lane reads what it gets, so that the race checker knows who reads what.
void load_matrices(unsigned* to, const void* row, bool transposed, Location where,
                   const void* code) {
  if (reinterpret_cast<std::uintptr_t>(row) % 16 != 0) {
    fail("load_matrices: a row is not aligned to 16 bytes (line %u)", unsigned(where.line()));
  }
  if (place_of(row, 16).kind != Place::kShared) {
    fail("load_matrices: a row is not in shared memory (line %u)", unsigned(where.line()));
  }
  const unsigned char* rows[32];
  exchange(transposed ? "load_transposed_matrices" : "load_matrices", resolve_addresses,
           Ordering::kNone, 0xffffffffu, reinterpret_cast<std::uint64_t>(row),
           reinterpret_cast<std::uint64_t>(rows), where);
  const unsigned of_four = current_lane() % 4, of_eight = current_lane() / 4;
  for (unsigned matrix = 0; matrix < 4; ++matrix) {
    to[matrix] = 0;
    for (unsigned i = 0; i < 2; ++i) {
      const unsigned element = 2 * of_four + i;
      const unsigned char* from = transposed ? rows[matrix * 8 + element] + of_eight * 2
                                             : rows[matrix * 8 + of_eight] + element * 2;
      announce(from, 2, Access::kRead, code);
      std::uint16_t bits;
      std::memcpy(&bits, from, 2);
      to[matrix] |= unsigned(bits) << (16 * i);
    }
  }
}

namespace {

struct Operands {  // of a lane
  float* sum;
  const unsigned* a;
  const unsigned* b;
};

template <class T>
double element(unsigned pair, unsigned which) {
  return double(to_float(T{std::uint16_t(pair >> (16 * which))}));
}

// The first lane that is served computes for all.
template <class T>
std::uint64_t resolve_multiply_add(const std::uint64_t* values, std::uint64_t argument, unsigned) {
  if (argument != values[0]) return 0;
  double a[16][16], b[16][8];
  const auto of_lane = [&](unsigned lane) {
    return *reinterpret_cast<const Operands*>(values[lane]);
  };
  for (unsigned lane = 0; lane < 32; ++lane) {
    const Operands operands = of_lane(lane);
    const unsigned g = lane / 4, c = 2 * (lane % 4);
    for (unsigned i = 0; i < 2; ++i) {
      for (unsigned part = 0; part < 4; ++part) {
        a[g + part % 2 * 8][c + i + part / 2 * 8] = element<T>(operands.a[part], i);
      }
      for (unsigned part = 0; part < 2; ++part) {
        b[c + i + part * 8][g] = element<T>(operands.b[part], i);
      }
    }
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    float* const sum = of_lane(lane).sum;
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned row = lane / 4 + i / 2 * 8, column = 2 * (lane % 4) + i % 2;
      double total = double(sum[i]);
      for (unsigned k = 0; k < 16; ++k) total += a[row][k] * b[k][column];
      sum[i] = float(total);
    }
  }
  return 0;
}

}  // namespace

void multiply_add(float* sum, const unsigned* a, const unsigned* b, bool brain_float,
                  Location where) {
  const Operands operands = {sum, a, b};
  const std::uint64_t mine = reinterpret_cast<std::uint64_t>(&operands);
  exchange(brain_float ? "multiply_add_bf16" : "multiply_add_f16",
           brain_float ? resolve_multiply_add<BFloat16> : resolve_multiply_add<Half>,
           Ordering::kNone, 0xffffffffu, mine, mine, where);
}

}  // namespace lmdecode::emulation
