// The mass at which a top-p prefix is full, in exact integer arithmetic.
#pragma once

#include <cstdint>

#include "common/bits.h"

namespace lmdecode {

// Smallest integer mass m with m >= p * total (or m > p * total where strict), and at least 1;
// total >= 1 and 0 < p < 1. Then 1 <= m <= total.
LMD_HOST_DEVICE uint64_t mass_threshold(float p, uint64_t total, bool strict) {
  const uint32_t bits = bits_of(p);
  const uint32_t field = bits >> 23;
  const uint64_t mantissa = (bits & 0x7fffffu) | (field ? 0x800000u : 0u);
  const int shift =
      150 - static_cast<int>(field ? field : 1);  // p = mantissa * 2^-shift, 24 <= shift <= 149
  // mantissa * total as high * 2^32 + low: 24 + 32 bits each.
  const uint64_t low = mantissa * (total & 0xffffffffu);
  const uint64_t high = mantissa * (total >> 32) + (low >> 32);
  const uint64_t low32 = low & 0xffffffffu;
  uint64_t floor_value;
  bool exact;
  if (shift < 32) {
    floor_value = (high << (32 - shift)) | (low32 >> shift);
    exact = (low32 & ((uint64_t{1} << shift) - 1)) == 0;
  } else if (shift < 32 + 63) {
    floor_value = high >> (shift - 32);
    exact = low32 == 0 && (high & ((uint64_t{1} << (shift - 32)) - 1)) == 0;
  } else {
    floor_value = 0;
    exact = false;  // 0 < p * total < 1
  }
  const uint64_t threshold = strict || !exact ? floor_value + 1 : floor_value;
  return threshold < 1 ? 1 : (threshold > total ? total : threshold);
}

}  // namespace lmdecode
