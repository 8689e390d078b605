// Weights to groups, and rows of x to groups of int8; see grouped_format.h.
#pragma once

#include "linear/linear_group_products.h"
#include "linear/linear_pack.h"

namespace lmdecode::LMD_SIMD::linear {

using namespace lmdecode::linear;

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

// Of some ways to cut the distance from the least to the largest number that with the least squared
// error: each gives codes, a line through them by least squares, rounded to float16, and new codes
// by that line. An error counts as much as its number is large, and as the numbers are on average.
// Sums go from the first element on.
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
