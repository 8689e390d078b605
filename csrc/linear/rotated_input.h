// A row of x, rotated as linear/rotation.h says, by vectors.
#pragma once

#include "linear/int8_scale.h"
#include "linear/rotation.h"

namespace lmdecode::LMD_SIMD::linear {

using namespace lmdecode::linear;

// 1 where a lane is the first of its pair, -1 where it is the second.
template <int kApart>
struct PairSigns {
  alignas(64) float of[kLanes];

  constexpr PairSigns() : of() {
    for (int i = 0; i < kLanes; ++i) of[i] = (i & kApart) == 0 ? 1.0f : -1.0f;
  }
};

// (a, b) -> (a + b, a - b) of lanes kApart apart: x times its signs, which is exact, + the others.
template <int kApart>
inline F32 butterfly_lanes(F32 x) {
#if defined(LMD_SIMD_AVX512)
  __m512 other;
  if constexpr (kApart == 1) {
    other = _mm512_permute_ps(x.v, 0xb1);
  } else if constexpr (kApart == 2) {
    other = _mm512_permute_ps(x.v, 0x4e);
  } else if constexpr (kApart == 4) {
    other = _mm512_shuffle_f32x4(x.v, x.v, 0xb1);
  } else {
    other = _mm512_shuffle_f32x4(x.v, x.v, 0x4e);
  }
  static constexpr PairSigns<kApart> kSigns;
  return {_mm512_fmadd_ps(x.v, _mm512_load_ps(kSigns.of), other)};
#elif defined(LMD_SIMD_AVX2)
  __m256 other;
  if constexpr (kApart == 1) {
    other = _mm256_permute_ps(x.v, 0xb1);
  } else if constexpr (kApart == 2) {
    other = _mm256_permute_ps(x.v, 0x4e);
  } else {
    other = _mm256_permute2f128_ps(x.v, x.v, 1);
  }
  static constexpr PairSigns<kApart> kSigns;
  return {_mm256_fmadd_ps(x.v, _mm256_load_ps(kSigns.of), other)};
#else
  float lane[kLanes];
  store(lane, x);
  for (int i = 0; i < kLanes; ++i) {
    if ((i & kApart) != 0) continue;
    const float a = lane[i], b = lane[i + kApart];
    lane[i] = a + b;
    lane[i + kApart] = a - b;
  }
  return load(lane);
#endif
}

// rotate_block() of `block` elements, at least kLanes.
template <int kBlock>
inline void rotate_block_by_vectors(const float* from, float* to, U32* largest) {
  constexpr int kVectors = kBlock / kLanes;
  F32 v[kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    v[i] = load(from + i * kLanes) * splat(rotation_scale(kBlock));
    v[i] = butterfly_lanes<1>(v[i]);
    v[i] = butterfly_lanes<2>(v[i]);
    v[i] = butterfly_lanes<4>(v[i]);
    if constexpr (kLanes == 16) v[i] = butterfly_lanes<8>(v[i]);
  }
#pragma GCC unroll 5
  for (int apart = 1; apart < kVectors; apart *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      if ((i & apart) != 0) continue;
      const F32 a = v[i], b = v[i + apart];
      v[i] = a + b;
      v[i + apart] = a - b;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    store(to + i * kLanes, v[i]);
    *largest = larger_magnitude_bits(*largest, v[i]);
  }
}

// Returns the bits of the largest magnitude.
inline uint32_t rotate_input(const float* x, int64_t stride, int64_t size, float* to) {
  U32 of_blocks = splat_u32(0);
  if (stride != 1) {
    for (int64_t i = 0; i < size; ++i) to[i] = x[i * stride];
    x = to;
  }
  int64_t at = 0;
  for (int64_t block; (block = rotated_block(at, size)) > 0; at += block) {
    switch (block) {
      case 64:
        rotate_block_by_vectors<64>(x + at, to + at, &of_blocks);
        break;
      case 32:
        rotate_block_by_vectors<32>(x + at, to + at, &of_blocks);
        break;
      default:
        rotate_block_by_vectors<16>(x + at, to + at, &of_blocks);
    }
  }
  const uint32_t of_rest = largest_magnitude_bits(x + at, size - at, 1);
  for (; at < size; ++at) to[at] = x[at];
  const uint32_t largest = largest_lane(of_blocks);
  return largest > of_rest ? largest : of_rest;
}

}  // namespace lmdecode::LMD_SIMD::linear
