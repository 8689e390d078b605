// The vectors of the build of this file: kLanes floats or 32-bit integers, the same operations at
// every level.
//
// A kernel file is compiled once for each CPU capability, with LMD_SIMD set to default_, avx2 or
// avx512; all of its code lies in namespace lmdecode::LMD_SIMD::<area>, so that no instruction of
// one level can be linked into another. Kernel files hold no std containers and throw nothing, for
// the same reason. simd/kernel_levels.h: how kernels are declared and picked.
//
// Every operation gives the same bits at every level: multiply_add is fused at each, and
// nothing else is. The exception is
// approximate_reciprocal, within 2^-11 of 1 / a, relative; +inf for 0: for bounds alone.
//
//   F32  load(p) for float, BFloat16, Half (exact); splat; + - * /; max(a, b) = a > b ? a : b, so b
//   where a is NaN;
//        round_even; subtract_f64(a, b, c): f32((f64(a) - b) - c); a >= b, a > b, a == b, is_nan(a,
//        b) -> Mask; select(mask, a, b)
//   U32  load, store, splat, iota, + ^ & | >>, a >= b (unsigned), a == b
//   U64  pairs of 32-bit lanes: even_lanes, odd_lanes, merge_lanes, multiply_low, high_half, xor3,
//        + and store
//        order4, transpose4: words of groups of four to token order
//   Mask bits(mask): bit i is lane i
//   compress_store(p, mask, v): the lanes of the mask, in order; writes kLanes elements or fewer at
//   p: p must have room
//        for kLanes more
//   MassSum: sums of floor(x) as 64-bit integers, 2^-126 <= x < 2^55 (no subnormals)
#pragma once

#if !defined(LMD_SIMD)
#error "LMD_SIMD must name the CPU capability that this file is compiled for"
#endif

#if defined(LMD_SIMD_AVX512)
#include "simd/vec_avx512.h"
#elif defined(LMD_SIMD_AVX2)
#include "simd/vec_avx2.h"
#else
#include "simd/vec_default.h"
#endif

namespace lmdecode::LMD_SIMD {

constexpr uint32_t kAllLanes = static_cast<uint32_t>((uint64_t{1} << kLanes) - 1);

// The first n < kLanes elements of p, fill in the other lanes.
template <class T>
inline F32 load_part(const T* p, int n, float fill) {
  alignas(64) float lane[kLanes];
  for (int i = 0; i < kLanes; ++i) lane[i] = i < n ? to_float(p[i]) : fill;
  return load(lane);
}

// scaled_weight() of common/exp_weight.h, lane by lane, the same bits.
inline F32 scaled_weight(F32 value, F32 max_value, F32 factor, float scale) {
  F32 exponent = max((value - max_value) * factor, splat(kMinExponent));
  const F32 whole = round_even(exponent);
  const F32 f = exponent - whole;
  F32 p = splat(kExp2C5);
  p = multiply_add(p, f, splat(kExp2C4));
  p = multiply_add(p, f, splat(kExp2C3));
  p = multiply_add(p, f, splat(kExp2C2));
  p = multiply_add(p, f, splat(kExp2C1));
  p = multiply_add(p, f, splat(1.0f));
  return multiply_power_of_two(p, whole + splat(scale));
}

// order_key() of common/bits.h, lane by lane; no NaN.
inline U32 order_keys(F32 value) {
  const U32 bits = bit_cast_u32(value + splat(0.0f));
  return bits ^ (sign_mask(bits) | splat_u32(0x80000000u));
}

}  // namespace lmdecode::LMD_SIMD
