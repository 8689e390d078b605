// Weights to groups of four bits, and rows of x to groups of int8; see linear_group_products.h.
#pragma once

#include "linear/linear_group_products.h"
#include "linear/linear_pack.h"

namespace lmdecode::LMD_SIMD::linear {

using namespace lmdecode::linear;

constexpr int32_t kMaxNibble = 15;
constexpr uint8_t kMiddle = 8;  // what counts as 0 without zeros
constexpr uint16_t kHalfNan = 0x7e00u;

// A group of one output: element i is about scale * (weights[i] - zero).
struct Int4Group {
  uint16_t scale;  // bits of a float16
  uint8_t zero;
  uint8_t weights[kMaxGroup];
};

inline bool is_finite(float value) { return magnitude_bits(value) < 0x7f800000u; }

// The float16 scale; NaN where it would be inf. `factor` becomes its reciprocal, 0 where it is 0.
inline uint16_t int4_scale(float value, float* factor) {
  const uint16_t bits = half_bits(value);
  const float scale = to_float(Half{bits});
  *factor = 0.0f;
  if (!is_finite(scale)) return kHalfNan;
  if (scale != 0.0f) *factor = 1.0f / scale;
  return bits;
}

inline uint8_t to_nibble(float value, float factor, int32_t zero) {
  const float product = value * factor;
  const int32_t whole = static_cast<int32_t>((product + kRoundMagic) - kRoundMagic) + zero;
  return static_cast<uint8_t>(whole < 0 ? 0 : whole > kMaxNibble ? kMaxNibble : whole);
}

// The first of the largest magnitude becomes 0, -8 scales: the scale has the opposite sign.
inline void quantise_group(const float* values, int count, Int4Group* group) {
  float largest = 0.0f;
  bool finite = true;
  for (int i = 0; i < count; ++i) {
    finite = finite && is_finite(values[i]);
    if (magnitude_bits(values[i]) > magnitude_bits(largest)) largest = values[i];
  }
  float factor = 0.0f;
  group->zero = kMiddle;
  group->scale = finite ? int4_scale(largest / -8.0f, &factor) : kHalfNan;
  for (int i = 0; i < count; ++i) {
    group->weights[i] = factor == 0.0f ? kMiddle : to_nibble(values[i], factor, kMiddle);
  }
}

// From the least to the largest, and 0 among them.
inline void quantise_group_with_zero(const float* values, int count, Int4Group* group) {
  float least = 0.0f, most = 0.0f;
  bool finite = true;
  for (int i = 0; i < count; ++i) {
    finite = finite && is_finite(values[i]);
    least = values[i] < least ? values[i] : least;
    most = values[i] > most ? values[i] : most;
  }
  float factor = 0.0f;
  // Halves, which do not overflow.
  const float step = (most * 0.5f - least * 0.5f) / 7.5f;
  group->scale = finite ? int4_scale(step, &factor) : kHalfNan;
  group->zero = factor == 0.0f ? 0 : to_nibble(0.0f - least, factor, 0);
  for (int i = 0; i < count; ++i) {
    group->weights[i] = factor == 0.0f ? group->zero : to_nibble(values[i], factor, group->zero);
  }
}

// The groups of one output to its column of a panel; fill(first, count, group) makes that of
// elements [first, first + count).
template <class Dot, class Fill>
void pack_groups(const PackedLinearShape& shape, const PackedLayout& layout, void* packed,
                 int64_t output, const Fill& fill) {
  const int64_t column = output % Dot::kWidth;
  char* step =
      static_cast<char*>(packed) + sizeof(PackedHeader) + output / Dot::kWidth * layout.panel_bytes;
  for (int64_t g = 0; g < layout.depth; ++g, step += layout.row_bytes) {
    Int4Group group = {};
    if (output < shape.out_features) {
      const int64_t first = g * Dot::kGroup, left = shape.in_features - first;
      fill(first, static_cast<int>(left < Dot::kGroup ? left : Dot::kGroup), &group);
    }
    __builtin_memcpy(step + 2 * column, &group.scale, sizeof(group.scale));
    if constexpr (Dot::kHasZeros) {
      step[2 * Dot::kWidth + column] = static_cast<char>(group.zero);
    }
    for (int s = 0; s < Dot::kGroup / 8; ++s) {
      char* const to = step + Dot::kNibblesAt + (s * Dot::kWidth + column) * 4;
      const uint8_t* const from = group.weights + 8 * s;
      for (int b = 0; b < 4; ++b) to[b] = static_cast<char>(from[b] | from[4 + b] << 4);
    }
  }
}

template <class Dot>
void pack_int4_output(const PackedLinearShape& shape, const float* weight, int64_t in_stride,
                      const PackedLayout& layout, void* packed, int64_t output) {
  pack_groups<Dot>(shape, layout, packed, output, [&](int64_t first, int count, Int4Group* group) {
    float values[Dot::kGroup];
    for (int i = 0; i < count; ++i) values[i] = weight[(first + i) * in_stride];
    if constexpr (Dot::kHasZeros) {
      quantise_group_with_zero(values, count, group);
    } else {
      quantise_group(values, count, group);
    }
  });
}

template <class Dot>
void pack_quantized_output(const PackedLinearShape& shape, const QuantizedWeight& weight,
                           const PackedLayout& layout, void* packed, int64_t output) {
  pack_groups<Dot>(shape, layout, packed, output, [&](int64_t first, int count, Int4Group* group) {
    const int64_t at = output * layout.depth + first / Dot::kGroup;
    group->scale = weight.scales[at].bits;
    group->zero = weight.zeros == nullptr ? kMiddle : weight.zeros[at];
    const uint8_t* from = weight.values + output * shape.in_features + first;
    for (int i = 0; i < count; ++i) group->weights[i] = from[i];
  });
}

// Elements of a group as whole multiples of the scale, as bytes, and their sum.
template <int kGroup>
inline int32_t store_group(char* to, const F32* values, float factor) {
#if defined(LMD_SIMD_AVX512)
  __m512i sum = _mm512_setzero_si512();
  for (int i = 0; i < kGroup / kLanes; ++i) {
    const __m512i whole = _mm512_cvtps_epi32((values[i] * splat(factor)).v);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + i, _mm512_cvtepi32_epi8(whole));
    sum = _mm512_add_epi32(sum, whole);
  }
  return _mm512_reduce_add_epi32(sum);
#else
  int32_t sum = 0;
  for (int i = 0; i < kGroup / kLanes; ++i) {
    alignas(64) float lane[kLanes];
    store(lane, round_even(values[i] * splat(factor)));
    for (int l = 0; l < kLanes; ++l) {
      const int32_t whole = static_cast<int32_t>(lane[l]);
      to[i * kLanes + l] = static_cast<char>(whole);
      sum += whole;
    }
  }
  return sum;
#endif
}

template <class Dot>
void prepare_grouped_row(const LinearInputRows& input, int64_t row) {
  char* to = input.rows + row * input.row_bytes;
  for (int64_t first = 0; first < input.in_features; first += Dot::kGroup, to += Dot::kInputBytes) {
    F32 values[Dot::kGroup / kLanes];
    U32 largest = splat_u32(0);
    for (int i = 0; i < Dot::kGroup / kLanes; ++i) {
      values[i] = load_input(input, row, first + i * kLanes);
      largest = larger_magnitude_bits(largest, values[i]);
    }
    const Int8Scale scale = Int8Scale::of(largest_lane(largest));
    if (scale.factor == 0.0f) {  // 0 times inf would be NaN
      for (F32& value : values) value = splat(0.0f);
    }
    const int32_t sum = store_group<Dot::kGroup>(to + sizeof(GroupInput), values, scale.factor);
    const GroupInput group = {scale.scale, Dot::kOffsetFactor * sum};
    __builtin_memcpy(to, &group, sizeof(group));
  }
}

}  // namespace lmdecode::LMD_SIMD::linear
