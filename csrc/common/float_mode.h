// Modes of arithmetic during a kernel, overriding torch.set_flush_denormal and the caller's mode of
// this thread.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lmdecode {

class ScopedIeeeMode {
 public:
#if defined(__x86_64__)
  ScopedIeeeMode() : saved_(_mm_getcsr()) {
    if (saved_ & kNotIeee) _mm_setcsr(saved_ & ~kNotIeee);
  }
  ~ScopedIeeeMode() {
    if (saved_ & kNotIeee) _mm_setcsr(saved_);
  }

 private:
  static constexpr unsigned kNotIeee =
      0x8000u | 0x0040u | 0x6000u;  // flush to zero, denormals are zero, rounding
  unsigned saved_;
#endif
};

#if defined(__x86_64__)
// Results that are subnormal become 0. Operands stay: 0 times the -inf of a hidden key is NaN.
class ScopedFlushMode {
 public:
  ScopedFlushMode() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8000u); }
  ~ScopedFlushMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
};
#endif

}  // namespace lmdecode
