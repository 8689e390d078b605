// From sums to y: scales, bias, activation, multiplier, residual; one panel's part of a row at a
// time.
#pragma once

#include "linear/linear_formats.h"

namespace lmdecode::LMD_SIMD::linear {

using namespace lmdecode::linear;

inline F32 reciprocal_of_one_plus_exp(F32 x) { return splat(1.0f) / (splat(1.0f) + exp_of(x)); }

template <Activation kActivation>
inline F32 activate(F32 x) {
  if constexpr (kActivation == Activation::kRelu) {
    return max(splat(0.0f), x);  // NaN stays
  } else if constexpr (kActivation == Activation::kGelu) {
    const F32 tail = normal_tail(abs(x));
    return x * select(x > splat(0.0f), splat(1.0f) - tail, tail);
  } else if constexpr (kActivation == Activation::kGeluTanh) {
    // (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
    const F32 cubic = accumulate(x * x, splat(0.044715f), splat(1.0f));
    return x * reciprocal_of_one_plus_exp(splat(-1.5957691216057308f) * (x * cubic));
  } else if constexpr (kActivation == Activation::kSilu) {
    return x * reciprocal_of_one_plus_exp(splat(0.0f) - x);
  } else {
    return x;
  }
}

// Sums of int8 products to floats.
struct Int8Columns {
  const float* scales;     // [width]
  const int32_t* offsets;  // [width]
};

inline F32 sums_to_floats(const float* sums, int, float, const Int8Columns&) { return load(sums); }

inline F32 sums_to_floats(const int32_t* sums, int at, float row_scale,
                          const Int8Columns& columns) {
  // Modulo 2^32: the offset of the longest rows takes the sum out of its range and back.
#if defined(LMD_SIMD_AVX512)
  const F32 value = {_mm512_cvtepi32_ps(
      _mm512_sub_epi32(_mm512_loadu_si512(sums), _mm512_loadu_si512(columns.offsets + at)))};
#else
  alignas(64) float lane[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t offset = static_cast<uint32_t>(columns.offsets[at + i]);
    lane[i] = static_cast<float>(static_cast<int32_t>(static_cast<uint32_t>(sums[i]) - offset));
  }
  const F32 value = load(lane);
#endif
  return value * (splat(row_scale) * load(columns.scales + at));
}

inline F32 load_columns(const float* p, int count) {
  return count >= kLanes ? load(p) : load_part(p, count, 0.0f);
}

// Vectors that are finished together, so that their activations overlap: with AVX-512 a whole
// panel, where a call for each row of it would take as long as the epilogue itself.
#if defined(LMD_SIMD_AVX512)
constexpr int kFinishedTogether = kPanelVectors;
#define LMD_INLINE_END __attribute__((always_inline)) inline
#else
constexpr int kFinishedTogether = 1;
#define LMD_INLINE_END inline
#endif

// `count` columns from `column` on of row `row`.
template <Activation kActivation, class Scalar>
LMD_INLINE_END void finish_columns(const Scalar* sums, int64_t row, int64_t column, int count,
                                   float row_scale, const Int8Columns& columns,
                                   const LinearOutput& output) {
  const auto finish = [&]<int kVectors>(int at, int left) __attribute__((always_inline)) {
    F32 value[kVectors];
    const auto each = [&](const auto& change) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) change(value[j], j * kLanes);
    };
    const auto load_from = [&](const float* p, int i) { return load_columns(p + i, left - i); };
    each([&](F32& x, int i) { x = sums_to_floats(sums + at + i, at + i, row_scale, columns); });
    if (output.bias != nullptr) {
      const float* const bias = output.bias + column + at;
      each([&](F32& x, int i) { x = x + load_from(bias, i); });
    }
    each([&](F32& x, int) { x = activate<kActivation>(x); });
    if (output.multiplier != nullptr) {
      const float* const by = output.multiplier + row * output.multiplier_stride + column + at;
      each([&](F32& x, int i) { x = x * load_from(by, i); });
    }
    if (output.residual != nullptr) {
      const float* const to = output.residual + row * output.residual_stride + column + at;
      each([&](F32& x, int i) { x = x + load_from(to, i); });
    }
    float* const y = output.y + row * output.y_stride + column + at;
    each([&](const F32& x, int i) {
      if (left - i >= kLanes) {
        store(y + i, x);
      } else {
        store_part(y + i, x, left - i);
      }
    });
  };
  int at = 0;
  if constexpr (kFinishedTogether > 1) {
    constexpr int kTogether = kFinishedTogether * kLanes;
    for (; count - at >= kTogether; at += kTogether) {
      finish.template operator()<kFinishedTogether>(at, kTogether);
    }
  }
  for (; at < count; at += kLanes) finish.template operator()<1>(at, count - at);
}
#undef LMD_INLINE_END

template <class Scalar>
inline void finish_row(const Scalar* sums, int64_t row, int64_t column, int count, float row_scale,
                       const Int8Columns& columns, const LinearOutput& output) {
  const auto finish = [&]<Activation kActivation>() {
    finish_columns<kActivation>(sums, row, column, count, row_scale, columns, output);
  };
  switch (output.activation) {
    case Activation::kNone:
      return finish.template operator()<Activation::kNone>();
    case Activation::kRelu:
      return finish.template operator()<Activation::kRelu>();
    case Activation::kGelu:
      return finish.template operator()<Activation::kGelu>();
    case Activation::kGeluTanh:
      return finish.template operator()<Activation::kGeluTanh>();
    case Activation::kSilu:
      return finish.template operator()<Activation::kSilu>();
  }
}

// The panels of a weight, and the ends of rows that met one.
template <class Dot>
class Panels {
 public:
  static constexpr int64_t kWidth = tile_of<Dot>().width;

  Panels(const PackedLinear& linear, const LinearInput& input, const LinearOutput& output)
      : layout(PackedLayout::of(linear.shape, tile_of<Dot>())),
        base_(static_cast<const char*>(linear.packed)),
        outputs_(linear.shape.out_features),
        input_(input),
        output_(output) {}

  const char* at(int64_t panel) const {
    return base_ + sizeof(PackedHeader) + panel * layout.panel_bytes;
  }

  // Rows [first, first + rows), whose sums [rows, kWidth] are.
  void finish(const typename Dot::Scalar* sums, int64_t panel, int64_t first, int64_t rows) const {
    const int64_t column = panel * kWidth;
    const int64_t left = outputs_ - column;
    const int count = static_cast<int>(left < kWidth ? left : kWidth);
    Int8Columns columns = {};
    if constexpr (kIsInt8<Dot>) {
      columns = {reinterpret_cast<const float*>(base_ + layout.scales_at) + column,
                 reinterpret_cast<const int32_t*>(base_ + layout.offsets_at) + column};
    }
    for (int64_t row = first; row < first + rows; ++row, sums += kWidth) {
      const float scale = kIsInt8<Dot> ? input_.scales[row] : 1.0f;
      finish_row(sums, row, column, count, scale, columns, output_);
    }
  }

  const PackedLayout layout;

 private:
  const char* const base_;
  const int64_t outputs_;
  const LinearInput& input_;
  const LinearOutput& output_;
};

}  // namespace lmdecode::LMD_SIMD::linear
