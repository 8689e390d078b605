// Natural logarithm in f64 from +, -, *, / alone, so that every compiler and device gives the same
// bits.
#pragma once

#include <cstdint>

#include "common/bits.h"

namespace lmdecode {

// 2 * atanh(s) for |s| <= 0.18; relative error below 2^-52.
LMD_HOST_DEVICE double two_atanh(double s) {
  const double t = s * s;
  double sum = 1.0 / 23.0;
  sum = sum * t + 1.0 / 21.0;
  sum = sum * t + 1.0 / 19.0;
  sum = sum * t + 1.0 / 17.0;
  sum = sum * t + 1.0 / 15.0;
  sum = sum * t + 1.0 / 13.0;
  sum = sum * t + 1.0 / 11.0;
  sum = sum * t + 1.0 / 9.0;
  sum = sum * t + 1.0 / 7.0;
  sum = sum * t + 1.0 / 5.0;
  sum = sum * t + 1.0 / 3.0;
  return 2.0 * s + 2.0 * s * (t * sum);
}

// log(value) for a positive, finite, normal value.
LMD_HOST_DEVICE double log_f64(double value) {
  const uint64_t bits = bits_of(value);
  int exponent = static_cast<int>(bits >> 52) - 1023;
  uint64_t fraction = bits & 0xfffffffffffffull;
  // mantissa in [sqrt(1/2), sqrt(2)): 0x6a09e667f3bcd is the fraction of sqrt(2).
  uint64_t biased = 1023;
  if (fraction >= 0x6a09e667f3bcdull) {
    biased = 1022;
    exponent += 1;
  }
  const double mantissa = double_of(biased << 52 | fraction);
  const double s = (mantissa - 1.0) / (mantissa + 1.0);
  // log(2) in two parts: exponent * kLn2High is exact.
  constexpr double kLn2High = 0x1.62e42fefa3800p-1;
  constexpr double kLn2Low = 0x1.ef35793c76730p-45;
  const double e = static_cast<double>(exponent);
  return e * kLn2High + (two_atanh(s) + e * kLn2Low);
}

}  // namespace lmdecode
