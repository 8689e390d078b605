// Unsigned integers of 128 bits, for products of masses.
#pragma once

#include <cstdint>

#include "common/bits.h"

namespace lmdecode {

__extension__ using Wide = unsigned __int128;

// Rounded to nearest, ties to even; a conversion of 64 bits is the widest that every device has.
LMD_HOST_DEVICE double to_double(Wide value) {
  const uint64_t high = static_cast<uint64_t>(value >> 64);
  if (high == 0) return static_cast<double>(static_cast<uint64_t>(value));
  const int shift = 64 - leading_zeros(high);
  const uint64_t top = static_cast<uint64_t>(value >> shift);
  const bool inexact = (value & ((Wide{1} << shift) - 1)) != 0;
  // The last of the 64 bits is sticky: it is set if any lower bit was.
  return static_cast<double>(top | (inexact ? 1 : 0)) *
         double_of(static_cast<uint64_t>(1023 + shift) << 52);
}

}  // namespace lmdecode
