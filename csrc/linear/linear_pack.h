// Weights to panels, and rows of x to the form in which products read them.
#pragma once

#include "linear/int8_scale.h"
#include "linear/linear_formats.h"
#include "linear/linear_group_products.h"
#include "linear/packed_linear_kernels.h"
#include "linear/rotation.h"
#if defined(LMD_SIMD_AVX512_AMX)
#include "simd/matrix_tiles.h"
#endif

// A row of x, rotated as linear/rotation.h says, by vectors.

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
    default:  // with groups: below
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

inline uint32_t largest_magnitude_bits(const LinearInputRows& input, int64_t row) {
  U32 largest = splat_u32(0);
  for (int64_t at = 0; at < input.in_features; at += kLanes) {
    largest = larger_magnitude_bits(largest, load_input(input, row, at));
  }
  return largest_lane(largest);
}

// kLanes elements, quantised, as bytes raised by 128 or as 16 bits.
template <class Dot>
inline void store_quantised(char* to, F32 value, float factor) {
#if defined(LMD_SIMD_AVX512)
  const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(value.v, _mm512_set1_ps(factor)));
  if constexpr (Dot::kValues == 4) {
    const __m512i raised = _mm512_add_epi32(whole, _mm512_set1_epi32(Dot::kInputOffset));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(raised));
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(whole));
  }
#else
  alignas(64) float lane[kLanes];
  store(lane, round_even(value * splat(factor)));
  int16_t* const words = reinterpret_cast<int16_t*>(to);
  for (int i = 0; i < kLanes; ++i) words[i] = static_cast<int16_t>(lane[i]);
#endif
}

// largest: where it is known, the bits of the row's largest magnitude.
template <class Dot>
void prepare_row(const LinearInputRows& input, int64_t row, const uint32_t* largest) {
#if defined(LMD_SIMD_AVX512_AMX)
  const int64_t height = input.tile_rows > 0 ? input.tile_rows : 1, in_tile = row % height;
  char* const to = input.rows + (row - in_tile) * input.row_bytes + in_tile * kMatrixTileBytes;
  const auto place = [&](int64_t byte) {
    return to + byte / kMatrixTileBytes * height * kMatrixTileBytes + byte % kMatrixTileBytes;
  };
#else
  char* const to = input.rows + row * input.row_bytes;
  const auto place = [&](int64_t byte) { return to + byte; };
#endif
  if constexpr (kIsInt8<Dot>) {
    const Int8Scale scale =
        Int8Scale::of(largest != nullptr ? *largest : largest_magnitude_bits(input, row));
    input.scales[row] = scale.scale;
    for (int64_t at = 0; at < input.in_features; at += kLanes) {
      const F32 value = scale.factor == 0.0f ? splat(0.0f) : load_input(input, row, at);
      store_quantised<Dot>(place(Dot::kValues == 4 ? at : 2 * at), value, scale.factor);
    }
  } else {
    for (int64_t at = 0; at < input.in_features; at += kLanes) {
      const F32 value = load_input(input, row, at);
      if constexpr (Dot::kValues == 1) {
        store(reinterpret_cast<float*>(place(4 * at)), value);
      } else if constexpr (Dot::kPhases == 2) {
        store(reinterpret_cast<float*>(place(4 * at)), round_to_bfloat16(value));
      } else {
        store_all(reinterpret_cast<BFloat16*>(place(2 * at)), value);
      }
    }
  }
#if defined(LMD_SIMD_AVX512_AMX)
  // Tiles take whole cache lines of a row.
  const int64_t vectors = (input.in_features + kLanes - 1) / kLanes;
  const int64_t used = vectors * kLanes * (kIsInt8<Dot> ? 1 : 2);
  __builtin_memset(place(used), 0, static_cast<size_t>(input.row_bytes - used));
#endif
}

// Weights to groups, and rows of x to groups of int8; see grouped_format.h.

// Groups of kLanes outputs, side by side: element i of each in values[i].
struct MinimumGroups {
  F32 scales, minimums;  // that a float16 holds; NaN where a weight is not finite
  F32 codes[kMaxGroup];
};

// Steps that are tried, as parts of the distance from the least number to the largest: 14 to 17.
constexpr int kMinimumCandidates = 17;
constexpr float kFirstSteps = 14.0f, kMoreSteps = 0.1875f;
constexpr float kLeastRange = 0x1p-100f;  // below it a group counts as one number

inline F32 at_most(F32 value, F32 most) { return select(value >= most, most, value); }

inline F32 rounded_to_half(F32 value) {
  Half halves[kLanes];
  store_all(halves, value);
  return load(halves);
}

// Numbers (value - minimum) * factor from 0 to 15, rounded.
inline F32 minimum_code(F32 value, F32 minimum, F32 factor) {
  const F32 steps = (value - minimum) * factor;
  return round_even(at_most(max(splat(0.0f), steps), splat(15.0f)));
}

// Tries kMinimumCandidates steps for the range from the least to the largest number, and keeps the
// one with the least squared error. Each gives codes; a line is fitted to them by least squares,
// rounded to float16, and gives new codes. An error is weighted by the magnitude of its number plus
// the average one. Sums run from the first element on.
inline void choose_minimums(const F32* values, int count, MinimumGroups* groups) {
  const F32 zero = splat(0.0f), one = splat(1.0f), size = splat(static_cast<float>(count));
  F32 least = values[0], most = values[0], magnitudes = zero, checked = zero;
  for (int i = 0; i < count; ++i) {
    least = at_most(values[i], least);
    most = max(values[i], most);
    magnitudes = magnitudes + abs(values[i]);
    checked = checked + values[i] * zero;  // NaN where one is not finite
  }
  const F32 average = magnitudes / size;
  const auto count_of = [&](int i) { return average + abs(values[i]); };
  F32 counts = zero, sum = zero;
  for (int i = 0; i < count; ++i) {
    counts = counts + count_of(i);
    sum = sum + count_of(i) * values[i];
  }
  const F32 range = most - least;
  const Mask has_range = range >= splat(kLeastRange);
  const F32 unit = select(has_range, one / range, zero);
  F32 best = splat(float_of(0x7f800000u)), scales = splat(float_of(0x7fc00000u)), minimums = scales;
  const auto consider = [&](F32 scale, F32 minimum) {
    scale = rounded_to_half(scale);
    minimum = rounded_to_half(minimum);
    const F32 factor = select(abs(scale) > zero, one / scale, zero);
    F32 error = zero;
    for (int i = 0; i < count; ++i) {
      const F32 off = scale * minimum_code(values[i], minimum, factor) + minimum - values[i];
      error = error + count_of(i) * (off * off);
    }
    const Mask is_better = best > error;
    best = select(is_better, error, best);
    scales = select(is_better, scale, scales);
    minimums = select(is_better, minimum, minimums);
  };
  consider(select(has_range, range / splat(15.0f), zero), least);
  for (int c = 0; c < kMinimumCandidates; ++c) {
    const F32 factor = unit * splat(kFirstSteps + kMoreSteps * static_cast<float>(c));
    F32 codes = zero, squares = zero, products = zero;
    for (int i = 0; i < count; ++i) {
      const F32 code = minimum_code(values[i], least, factor);
      const F32 counted = count_of(i) * code;
      codes = codes + counted;
      squares = squares + counted * code;
      products = products + counted * values[i];
    }
    const F32 determinant = counts * squares - codes * codes;
    const Mask is_line = determinant > zero;
    const F32 scale = (counts * products - codes * sum) / select(is_line, determinant, one);
    const F32 minimum = (squares * sum - codes * products) / select(is_line, determinant, one);
    consider(select(is_line, scale, zero), select(is_line, minimum, least));
  }
  const Mask is_finite = checked == zero;
  groups->scales = select(is_finite, scales, splat(float_of(0x7fc00000u)));
  groups->minimums = select(is_finite, minimums, splat(float_of(0x7fc00000u)));
  const Mask has_steps = abs(groups->scales) > zero;
  const F32 factor = select(has_steps, one / groups->scales, zero);
  for (int i = 0; i < count; ++i) {
    const F32 code = minimum_code(values[i], groups->minimums, factor);
    groups->codes[i] = select(has_steps, code, zero);
  }
}

// The weights of kLanes outputs from `output` on, whose rows begin at `weight`, as 0 to 15 times a
// scale and a minimum.
template <class Dot>
void pack_minimum_outputs(const PackedLinearShape& shape, const float* weight, int64_t out_stride,
                          int64_t in_stride, const PackedLayout& layout, void* packed,
                          int64_t output) {
  const int64_t column = output % Dot::kWidth;
  char* step =
      static_cast<char*>(packed) + sizeof(PackedHeader) + output / Dot::kWidth * layout.panel_bytes;
  for (int64_t g = 0; g < layout.depth; ++g, step += layout.row_bytes) {
    const int64_t first = g * Dot::kGroup, left = shape.in_features - first;
    const int count = static_cast<int>(left < Dot::kGroup ? left : Dot::kGroup);
    F32 values[Dot::kGroup];
    for (int i = 0; i < count; ++i) {
      alignas(64) float lane[kLanes] = {};
      for (int64_t l = 0; l < kLanes && output + l < shape.out_features; ++l) {
        lane[l] = weight[l * out_stride + (first + i) * in_stride];
      }
      values[i] = load(lane);
    }
    MinimumGroups groups;
    choose_minimums(values, count, &groups);
    alignas(64) float scales[kLanes], minimums[kLanes], codes[Dot::kGroup][kLanes];
    store(scales, groups.scales);
    store(minimums, groups.minimums);
    for (int i = 0; i < count; ++i) store(codes[i], groups.codes[i]);
    for (int l = 0; l < kLanes; ++l) {
      GroupedStep of_output;
      of_output.groups[0] = {half_bits(scales[l]), half_bits(minimums[l])};
      for (int i = 0; i < count; ++i) of_output.codes[i] = static_cast<uint8_t>(codes[i][l]);
      write_step(Dot::kGrouped, of_output, StepCursor(step, Dot::kWidth, column + l));
    }
  }
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
  constexpr int kGroup = Dot::kGroup;
  constexpr int kVectors = kGroup / kLanes;
  for (int64_t first = 0; first < input.in_features; first += kGroup, to += Dot::kGroupInputBytes) {
    F32 values[kVectors];
    U32 largest = splat_u32(0);
    for (int i = 0; i < kVectors; ++i) {
      values[i] = load_input(input, row, first + i * kLanes);
      largest = larger_magnitude_bits(largest, values[i]);
    }
    const Int8Scale scale = Int8Scale::of(largest_lane(largest));
    if (scale.factor == 0.0f) {  // 0 times inf would be NaN
      for (F32& value : values) value = splat(0.0f);
    }
    const int32_t sum = store_group<kGroup>(to + sizeof(GroupInput), values, scale.factor);
    GroupInput group = {scale.scale, {0}};
    if constexpr (Dot::kHasMinimums) {
      group.scaled_sum = scale.scale * static_cast<float>(sum);
    } else {
      group.offset = (Dot::kHasZeros ? -1 : -Dot::kGrouped.middle()) * sum;
    }
    __builtin_memcpy(to, &group, sizeof(group));
  }
}

}  // namespace lmdecode::LMD_SIMD::linear
