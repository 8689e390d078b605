// From sums to y: scales, bias, activation, multiplier, residual; a block of rows of a panel at a
// time.
#pragma once

#include <type_traits>

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

// Integers with sign.
inline F32 to_floats(U32 value) {
#if defined(LMD_SIMD_AVX512)
  return {_mm512_cvtepi32_ps(value.v)};
#elif defined(LMD_SIMD_AVX2)
  return {_mm256_cvtepi32_ps(value.v)};
#else
  F32 result;
  for (int i = 0; i < kLanes; ++i)
    result.v[i] = static_cast<float>(static_cast<int32_t>(value.v[i]));
  return result;
#endif
}

inline U32 load_integers(const int32_t* p) { return load(reinterpret_cast<const uint32_t*>(p)); }

// Rows [first, first + rows) of the outputs from `column` on, of which there are `left`.
struct RowEnds {
  int64_t first, rows, column, left;
  const float* row_scales;  // of int8 products: of all rows
  const float* scales;      // likewise, of all outputs
  const int32_t* offsets;   // likewise: what their sums are too large by
};

// Vectors that are finished together, so that their activations overlap: those of a panel.
#if defined(LMD_SIMD_AVX512) || defined(LMD_SIMD_AVX2)
template <int64_t kWidth>
constexpr int kFinishedTogether = static_cast<int>(kWidth / kLanes);
#else
template <int64_t kWidth>
constexpr int kFinishedTogether = 1;
#endif

// sums [rows, kWidth] from the first column on; kVectors vectors, or one, of which part is left.
template <Activation kActivation, int64_t kWidth, int kVectors, bool kIsPart, class Scalar>
void finish_vectors(const Scalar* sums, const RowEnds& ends, const LinearOutput& output) {
  const auto each = [&](const auto& visit) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) visit(j, j * kLanes);
  };
  const auto load_columns = [&](const float* p) __attribute__((always_inline)) {
    if (kIsPart && ends.left < kLanes) return load_part(p, static_cast<int>(ends.left), 0.0f);
    return load(p);
  };
  F32 bias[kVectors] = {};
  [[maybe_unused]] F32 scales[kVectors];
  [[maybe_unused]] U32 minus_offsets[kVectors];
  each([&](int j, int i) {
    if (output.bias != nullptr) bias[j] = load_columns(output.bias + ends.column + i);
    if constexpr (!std::is_same_v<Scalar, float>) {
      scales[j] = load(ends.scales + ends.column + i);
      const U32 offsets = load_integers(ends.offsets + ends.column + i);
      minus_offsets[j] = (offsets ^ splat_u32(0xffffffffu)) + splat_u32(1);
    }
  });
  for (int64_t row = ends.first; row < ends.first + ends.rows; ++row, sums += kWidth) {
    F32 value[kVectors];
    if constexpr (std::is_same_v<Scalar, float>) {
      each([&](int j, int i) { value[j] = load(sums + i); });
    } else {
      // Modulo 2^32: the offset of the longest rows takes the sum out of its range and back.
      const F32 row_scale = splat(ends.row_scales[row]);
      each([&](int j, int i) {
        value[j] = to_floats(load_integers(sums + i) + minus_offsets[j]) * (row_scale * scales[j]);
      });
    }
    if (output.bias != nullptr) each([&](int j, int) { value[j] = value[j] + bias[j]; });
    each([&](int j, int) { value[j] = activate<kActivation>(value[j]); });
    if (output.multiplier != nullptr) {
      const float* const by = output.multiplier + row * output.multiplier_stride + ends.column;
      each([&](int j, int i) { value[j] = value[j] * load_columns(by + i); });
    }
    if (output.residual != nullptr) {
      const float* const to = output.residual + row * output.residual_stride + ends.column;
      each([&](int j, int i) { value[j] = value[j] + load_columns(to + i); });
    }
    float* const y = output.y + row * output.y_stride + ends.column;
    each([&](int j, int i) {
      if (kIsPart && ends.left < kLanes) {
        store_part(y, value[j], static_cast<int>(ends.left));
      } else {
        store(y + i, value[j]);
      }
    });
  }
}

template <int64_t kWidth, class Scalar>
void finish_rows(const Scalar* sums, RowEnds ends, const LinearOutput& output) {
  constexpr int kVectors = kFinishedTogether<kWidth>, kTogether = kVectors * kLanes;
  const auto finish = [&]<Activation kActivation>() {
    const bool is_part = ends.left < kWidth;
    const int64_t count = is_part ? ends.left : kWidth, step = is_part ? kLanes : kTogether;
    for (int64_t at = 0; at < count; at += step, ends.column += step, ends.left -= step) {
      if (is_part) {
        finish_vectors<kActivation, kWidth, 1, true>(sums + at, ends, output);
      } else {
        finish_vectors<kActivation, kWidth, kVectors, false>(sums + at, ends, output);
      }
    }
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
    RowEnds ends = {first, rows, panel * kWidth, outputs_ - panel * kWidth, input_.scales, {}, {}};
    if constexpr (kIsInt8<Dot>) {
      ends.scales = reinterpret_cast<const float*>(base_ + layout.scales_at);
      ends.offsets = reinterpret_cast<const int32_t*>(base_ + layout.offsets_at);
    }
    finish_rows<kWidth>(sums, ends, output_);
  }

  const PackedLayout layout;

 private:
  const char* const base_;
  const int64_t outputs_;
  const LinearInput& input_;
  const LinearOutput& output_;
};

}  // namespace lmdecode::LMD_SIMD::linear
