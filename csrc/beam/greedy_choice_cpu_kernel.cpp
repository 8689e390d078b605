// Compiled once for each CPU capability, with LMD_SIMD naming it.
#include "beam/greedy_choice.h"
#include "simd/vec_math.h"

namespace lmdecode::LMD_SIMD::beam {

// The largest of values[0 .. size), NaN where one is.
float largest_value(const float* values, int64_t size) {
  F32 top = splat(minus_infinity()), nan = splat(0.0f);
  int64_t i = 0;
  const auto take = [&](F32 value) {
    top = max(value, top);
    nan = select(is_nan(value, value), value, nan);
  };
  for (; i + kLanes <= size; i += kLanes) take(load(values + i));
  if (i < size) take(load_part(values + i, static_cast<int>(size - i), minus_infinity()));
  if (bits(is_nan(nan, nan)) != 0) return __builtin_nanf("");
  return reduce_max(top);
}

// The sum of exp(values - top).
double sum_of_exponentials(const float* values, int64_t size, float top) {
  const F32 factor = splat(static_cast<float>(kLog2E)), shift = splat(top);
  double sum = 0.0;
  constexpr int64_t kPart = 1024;  // added up in f32
  for (int64_t begin = 0; begin < size; begin += kPart) {
    const int64_t end = begin + kPart < size ? begin + kPart : size;
    F32 part = splat(0.0f);
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      part = part + exp2_of((load(values + i) - shift) * factor);
    }
    if (i < end) {
      const F32 rest = load_part(values + i, static_cast<int>(end - i), minus_infinity());
      part = part + exp2_of((rest - shift) * factor);
    }
    alignas(64) float lane[kLanes];
    store(lane, part);
    for (int j = 0; j < kLanes; ++j) sum += static_cast<double>(lane[j]);
  }
  return sum;
}

// The first place of a value that is there.
int64_t first_place(const float* values, int64_t size, float value) {
  const F32 wanted = splat(value);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    if (bits(load(values + i) == wanted) != 0) break;
  }
  while (i < size && values[i] != value) ++i;
  return i;
}

}  // namespace lmdecode::LMD_SIMD::beam
