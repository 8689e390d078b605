// Powers in f64 from +, -, *, / alone, so that every compiler and device gives the same bits.
#pragma once

#include "common/bits.h"
#include "common/log.h"

namespace lmdecode {

// exp(x) for |x| <= 700; relative error below 2^-50.
LMD_HOST_DEVICE double portable_exp_f64(double x) {
  constexpr double kLn2High = 0x1.62e42fefa3800p-1;
  constexpr double kLn2Low = 0x1.ef35793c76730p-45;
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52: rounds to the nearest integer
  const double whole = (x * 1.4426950408889634074 + kMagic) - kMagic;
  const double r = (x - whole * kLn2High) - whole * kLn2Low;
  double sum = 1.0;
  for (int i = 13; i >= 1; --i) sum = sum * (r / static_cast<double>(i)) + 1.0;
  return sum * double_of(static_cast<uint64_t>(static_cast<int64_t>(whole) + 1023) << 52);
}

// base^exponent for 0 <= base <= 1 and any finite exponent, up to e^700; 0^0 is 1.
LMD_HOST_DEVICE double power_of_share(double base, double exponent) {
  if (exponent == 0.0) return 1.0;
  if (exponent == 1.0) return base;
  if (!(base > 0.0)) return exponent > 0.0 ? 0.0 : portable_exp_f64(700.0);
  const double log = exponent * log_f64(base);
  return log < -700.0 ? 0.0 : portable_exp_f64(log > 700.0 ? 700.0 : log);
}

// base^n by repeated squaring, +inf beyond f64; base >= 0.
LMD_HOST_DEVICE double integer_power(double base, int64_t n) {
  double power = 1.0;
  for (; n > 0; n >>= 1) {
    if (n & 1) power *= base;
    base *= base;
  }
  return power;
}

}  // namespace lmdecode
