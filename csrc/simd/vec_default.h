// simd/vec.h in plain C++: runs anywhere; compilers turn the loops over lanes into whatever vectors
// they have.
#pragma once

#include <cstdint>

#include "common/exp_weight.h"
#include "common/half.h"

namespace lmdecode::LMD_SIMD {

constexpr int kLanes = 8;

struct F32 {
  float v[kLanes];
};
struct U32 {
  uint32_t v[kLanes];
};
struct Mask {
  uint32_t v[kLanes];  // 0 or 1
};

#define LMD_EACH_LANE for (int i = 0; i < kLanes; ++i)

template <class T>
inline F32 load(const T* p) {
  F32 r;
  LMD_EACH_LANE r.v[i] = to_float(p[i]);
  return r;
}
inline void store(float* p, F32 a) { LMD_EACH_LANE p[i] = a.v[i]; }
inline F32 splat(float a) {
  F32 r;
  LMD_EACH_LANE r.v[i] = a;
  return r;
}
#define LMD_BINARY(Result, Type, name, expression) \
  inline Result name(Type a, Type b) {             \
    Result r;                                      \
    LMD_EACH_LANE r.v[i] = expression;             \
    return r;                                      \
  }
LMD_BINARY(F32, F32, operator+, a.v[i] + b.v[i])
LMD_BINARY(F32, F32, operator-, a.v[i] - b.v[i])
LMD_BINARY(F32, F32, operator*, a.v[i] * b.v[i])
LMD_BINARY(F32, F32, operator/, a.v[i] / b.v[i])
LMD_BINARY(F32, F32, max, a.v[i] > b.v[i] ? a.v[i] : b.v[i])
LMD_BINARY(Mask, F32, operator>=, a.v[i] >= b.v[i])
LMD_BINARY(Mask, F32, operator>, a.v[i] > b.v[i])
LMD_BINARY(Mask, F32, operator==, a.v[i] == b.v[i])
LMD_BINARY(Mask, F32, is_nan, a.v[i] != a.v[i] || b.v[i] != b.v[i])
LMD_BINARY(U32, U32, operator+, a.v[i] + b.v[i])
LMD_BINARY(U32, U32, operator^, a.v[i] ^ b.v[i])
LMD_BINARY(U32, U32, operator&, a.v[i] & b.v[i])
LMD_BINARY(U32, U32, operator|, a.v[i] | b.v[i])
LMD_BINARY(Mask, U32, operator>=, a.v[i] >= b.v[i])
LMD_BINARY(Mask, U32, operator==, a.v[i] == b.v[i])
LMD_BINARY(Mask, Mask, operator_or, a.v[i] | b.v[i])
#undef LMD_BINARY

inline F32 multiply_add(F32 a, F32 b, F32 c) {
  LMD_EACH_LANE a.v[i] = fused_multiply_add(a.v[i], b.v[i], c.v[i]);
  return a;
}
inline F32 abs(F32 a) {
  LMD_EACH_LANE a.v[i] = float_of(bits_of(a.v[i]) & 0x7fffffffu);
  return a;
}
inline F32 round_even(F32 a) {  // |a| < 2^22
  LMD_EACH_LANE a.v[i] = (a.v[i] + kRoundMagic) - kRoundMagic;
  return a;
}
inline F32 multiply_power_of_two(F32 a, F32 exponent) {
  LMD_EACH_LANE a.v[i] = float_of(
      bits_of(a.v[i]) + (static_cast<uint32_t>(static_cast<int32_t>(exponent.v[i])) << 23));
  return a;
}
inline F32 select(Mask m, F32 a, F32 b) {
  LMD_EACH_LANE a.v[i] = m.v[i] ? a.v[i] : b.v[i];
  return a;
}
// f32((f64(a) - b) - c)
inline F32 subtract_f64(F32 a, double b, double c) {
  LMD_EACH_LANE a.v[i] = static_cast<float>((static_cast<double>(a.v[i]) - b) - c);
  return a;
}
inline F32 approximate_reciprocal(F32 a) { return splat(1.0f) / a; }
inline float reduce_max(F32 a) {
  float r = a.v[0];
  for (int i = 1; i < kLanes; ++i) r = a.v[i] > r ? a.v[i] : r;
  return r;
}
// Lane i is added to lane i + half, then halves of that.
inline float reduce_add(F32 a) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) a.v[i] += a.v[i + half];
  }
  return a.v[0];
}

inline U32 load(const uint32_t* p) {
  U32 r;
  LMD_EACH_LANE r.v[i] = p[i];
  return r;
}
inline void store(uint32_t* p, U32 a) { LMD_EACH_LANE p[i] = a.v[i]; }
inline U32 splat_u32(uint32_t a) {
  U32 r;
  LMD_EACH_LANE r.v[i] = a;
  return r;
}
inline U32 iota_u32() {
  U32 r;
  LMD_EACH_LANE r.v[i] = static_cast<uint32_t>(i);
  return r;
}
template <int N>
inline U32 shift_right(U32 a) {
  LMD_EACH_LANE a.v[i] >>= N;
  return a;
}
inline U32 shift_left_one(U32 n) {
  LMD_EACH_LANE n.v[i] = 1u << n.v[i];
  return n;
}
inline U32 sign_mask(U32 a) {
  LMD_EACH_LANE a.v[i] = static_cast<uint32_t>(static_cast<int32_t>(a.v[i]) >> 31);
  return a;
}
inline U32 select(Mask m, U32 a, U32 b) {
  LMD_EACH_LANE a.v[i] = m.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline U32 bit_cast_u32(F32 a) {
  U32 r;
  LMD_EACH_LANE r.v[i] = bits_of(a.v[i]);
  return r;
}
inline F32 bit_cast_f32(U32 a) {
  F32 r;
  LMD_EACH_LANE r.v[i] = float_of(a.v[i]);
  return r;
}
inline F32 convert_u32(U32 a) {
  F32 r;
  LMD_EACH_LANE r.v[i] = static_cast<float>(a.v[i]);
  return r;
}

struct U64 {
  uint64_t v[kLanes / 2];
};
#define LMD_EACH_PAIR for (int i = 0; i < kLanes / 2; ++i)
inline U64 even_lanes(U32 a) {
  U64 r;
  LMD_EACH_PAIR r.v[i] = a.v[2 * i];
  return r;
}
inline U64 odd_lanes(U32 a) {
  U64 r;
  LMD_EACH_PAIR r.v[i] = a.v[2 * i + 1];
  return r;
}
inline U32 merge_lanes(U64 even, U64 odd) {
  U32 r;
  LMD_EACH_PAIR {
    r.v[2 * i] = static_cast<uint32_t>(even.v[i]);
    r.v[2 * i + 1] = static_cast<uint32_t>(odd.v[i]);
  }
  return r;
}
inline U64 splat_u64(uint64_t a) {
  U64 r;
  LMD_EACH_PAIR r.v[i] = a;
  return r;
}
inline U64 multiply_low(U64 a, U64 m) {
  LMD_EACH_PAIR a.v[i] = (a.v[i] & 0xffffffffu) * (m.v[i] & 0xffffffffu);
  return a;
}
inline U64 operator+(U64 a, U64 b) {
  LMD_EACH_PAIR a.v[i] += b.v[i];
  return a;
}
inline void store(uint64_t* p, U64 a) { LMD_EACH_PAIR p[i] = a.v[i]; }
inline U64 high_half(U64 a) {
  LMD_EACH_PAIR a.v[i] >>= 32;
  return a;
}
inline U64 xor3(U64 a, U64 b, U64 c) {
  LMD_EACH_PAIR a.v[i] ^= b.v[i] ^ c.v[i];
  return a;
}
#undef LMD_EACH_PAIR

inline U32 order4() { return iota_u32(); }
inline void transpose4(U32 (&w)[4]) {
  uint32_t out[4 * kLanes];
  for (int j = 0; j < 4; ++j) LMD_EACH_LANE out[4 * i + j] = w[j].v[i];
  for (int j = 0; j < 4; ++j) w[j] = load(out + j * kLanes);
}

inline uint32_t bits(Mask m) {
  uint32_t r = 0;
  LMD_EACH_LANE r |= m.v[i] << i;
  return r;
}
inline int count(uint32_t mask_bits) { return __builtin_popcount(mask_bits); }

inline void compress_store(float* p, uint32_t mask, F32 a) {
  LMD_EACH_LANE {
    *p = a.v[i];
    p += mask >> i & 1;
  }
}
inline void compress_store(uint32_t* p, uint32_t mask, U32 a) {
  LMD_EACH_LANE {
    *p = a.v[i];
    p += mask >> i & 1;
  }
}
inline void compress_store(uint64_t* p, uint32_t mask, const uint64_t* from) {
  LMD_EACH_LANE {
    *p = from[i];
    p += mask >> i & 1;
  }
}

class MassSum {
 public:
  void add(F32 a) { LMD_EACH_LANE sum_[i] += static_cast<uint64_t>(a.v[i]); }
  void add(F32 a, Mask m, MassSum* masked) {
    LMD_EACH_LANE {
      const uint64_t mass = static_cast<uint64_t>(a.v[i]);
      sum_[i] += mass;
      masked->sum_[i] += m.v[i] ? mass : 0;
    }
  }
  void add(const uint64_t* p, Mask m) { LMD_EACH_LANE sum_[i] += m.v[i] ? p[i] : 0; }
  uint64_t total() const {
    uint64_t r = 0;
    LMD_EACH_LANE r += sum_[i];
    return r;
  }
  static void store_masses(uint64_t* p, F32 a) {
    LMD_EACH_LANE p[i] = static_cast<uint64_t>(a.v[i]);
  }

 private:
  uint64_t sum_[kLanes] = {};
};

#undef LMD_EACH_LANE

}  // namespace lmdecode::LMD_SIMD
