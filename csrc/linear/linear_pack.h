// Weights to panels, and rows of x to the form in which products read them.
#pragma once

#include "linear/int8_scale.h"
#include "linear/linear_formats.h"
#include "linear/packed_linear_kernels.h"

namespace lmdecode::LMD_SIMD::linear {

using namespace lmdecode::linear;

// The weights of one output: element(i) reads W, put(i, ...) writes the panel.
template <class Dot>
void pack_output(const PackedLinearShape& shape, const float* weight, int64_t in_stride,
                 const PackedLayout& layout, void* packed, int64_t output) {
  constexpr int64_t kWidth = tile_of<Dot>().width;
  const int64_t column = output % kWidth;
  char* const base = static_cast<char*>(packed);
  char* const panel = base + sizeof(PackedHeader) + output / kWidth * layout.panel_bytes;
  const bool is_padding = output >= shape.out_features;
  const int64_t size = is_padding ? 0 : shape.in_features;

  const auto each = [&](auto* first, const auto& value_of) {
    const int64_t row = kWidth * Dot::kValues;
    for (int64_t step = 0; step < layout.depth; ++step) {
      for (int64_t v = 0; v < Dot::kValues; ++v) {
        const int64_t i = step * Dot::kValues + v;
        first[step * row + column * Dot::kValues + v] =
            value_of(i < size ? weight[i * in_stride] : 0.0f);
      }
    }
  };

  switch (shape.format) {
    case LinearFormat::kFloat32:
      return each(reinterpret_cast<float*>(panel), [](float value) { return value; });
    case LinearFormat::kBFloat16:
      return each(reinterpret_cast<uint16_t*>(panel),
                  [](float value) { return bfloat16_bits(value); });
    case LinearFormat::kInt8:
    case LinearFormat::kInt8Rotated: {
      const Int8Scale scale = Int8Scale::of(largest_magnitude_bits(weight, size, in_stride));
      int32_t sum = 0;
      each(reinterpret_cast<int8_t*>(panel), [&](float value) {
        const int32_t rounded = to_int8(value, scale.factor);
        sum += rounded;
        return static_cast<int8_t>(rounded);
      });
      if constexpr (kIsInt8<Dot>) {
        reinterpret_cast<float*>(base + layout.scales_at)[output] = scale.scale;
        reinterpret_cast<int32_t*>(base + layout.offsets_at)[output] = Dot::kInputOffset * sum;
      }
      return;
    }
    default:  // with groups: linear_group_pack.h
      return;
  }
}

// Elements [at, at + kLanes) of a row of x, 0 beyond its end.
inline F32 load_input(const LinearInputRows& input, int64_t row, int64_t at) {
  const float* p = input.x + row * input.row_stride + at * input.element_stride;
  const int64_t left = input.in_features - at;
  if (input.element_stride == 1 && left >= kLanes) return load(p);
  alignas(64) float lane[kLanes] = {};
  for (int64_t i = 0; i < kLanes && i < left; ++i) lane[i] = p[i * input.element_stride];
  return load(lane);
}

// A row of x as floats that bfloat16 holds.
inline F32 round_to_bfloat16(F32 value) {
  const U32 bits = bit_cast_u32(value);
  const U32 odd = shift_right<16>(bits) & splat_u32(1);
  const U32 rounded = (bits + splat_u32(0x7fffu) + odd) & splat_u32(0xffff0000u);
  const U32 quiet = (bits | splat_u32(0x400000u)) & splat_u32(0xffff0000u);
  return bit_cast_f32(select(is_nan(value, value), quiet, rounded));
}

inline uint32_t largest_magnitude_bits(const LinearInputRows& input, int64_t row) {
  U32 largest = splat_u32(0);
  for (int64_t at = 0; at < input.in_features; at += kLanes) {
    largest = larger_magnitude_bits(largest, load_input(input, row, at));
  }
  return largest_lane(largest);
}

// kLanes elements, quantised, as bytes raised by 128 or as 16 bits.
template <class Dot>
inline void store_quantised(char* row, int64_t at, F32 value, float factor) {
#if defined(LMD_SIMD_AVX512)
  const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(value.v, _mm512_set1_ps(factor)));
  if constexpr (Dot::kValues == 4) {
    const __m512i raised = _mm512_add_epi32(whole, _mm512_set1_epi32(Dot::kInputOffset));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(row + at), _mm512_cvtepi32_epi8(raised));
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + 2 * at), _mm512_cvtepi32_epi16(whole));
  }
#else
  alignas(64) float lane[kLanes];
  store(lane, round_even(value * splat(factor)));
  int16_t* to = reinterpret_cast<int16_t*>(row) + at;
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<int16_t>(lane[i]);
#endif
}

// largest: where it is known, the bits of the row's largest magnitude.
template <class Dot>
void prepare_row(const LinearInputRows& input, int64_t row, const uint32_t* largest) {
  char* const to = input.rows + row * input.row_bytes;
  if constexpr (kIsInt8<Dot>) {
    const Int8Scale scale =
        Int8Scale::of(largest != nullptr ? *largest : largest_magnitude_bits(input, row));
    input.scales[row] = scale.scale;
    for (int64_t at = 0; at < input.in_features; at += kLanes) {
      const F32 value = scale.factor == 0.0f ? splat(0.0f) : load_input(input, row, at);
      store_quantised<Dot>(to, at, value, scale.factor);
    }
  } else {
    for (int64_t at = 0; at < input.in_features; at += kLanes) {
      const F32 value = load_input(input, row, at);
      if constexpr (Dot::kValues == 1) {
        store(reinterpret_cast<float*>(to) + at, value);
      } else if constexpr (Dot::kPhases == 2) {
        store(reinterpret_cast<float*>(to) + at, round_to_bfloat16(value));
      } else {
        store_all(reinterpret_cast<BFloat16*>(to) + at, value);
      }
    }
  }
#if defined(LMD_SIMD_AVX512_AMX)
  // Tiles take whole cache lines of a row.
  const int64_t vectors = (input.in_features + kLanes - 1) / kLanes;
  const int64_t used = vectors * kLanes * (kIsInt8<Dot> ? 1 : 2);
  __builtin_memset(to + used, 0, static_cast<size_t>(input.row_bytes - used));
#endif
}

}  // namespace lmdecode::LMD_SIMD::linear
