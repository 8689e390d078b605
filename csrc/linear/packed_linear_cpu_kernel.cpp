// Compiled once for each CPU capability, with LMD_SIMD naming it.
#include "linear/linear_epilogue.h"
#include "linear/linear_group_pack.h"
#include "linear/linear_group_tiles.h"
#include "linear/linear_pack.h"
#include "linear/linear_tiles.h"
#include "linear/packed_linear_kernels.h"
#include "linear/rotated_input.h"

namespace lmdecode::LMD_SIMD::linear {

using namespace lmdecode::linear;

namespace {

// Steps along the depth that all rows pass over before the next.
template <class Dot>
constexpr int64_t kChainSteps = [] {
  if constexpr (kIsGrouped<Dot>) return tuning::kGroupChainElements / Dot::kGrouped.step();
  return kChainLength;
}();

template <class Dot>
void multiply_panels(const PackedLinear& linear, const LinearInput& input,
                     const LinearOutput& output, int64_t begin, int64_t end) {
  constexpr int64_t kWidth = tile_of<Dot>().width;
  using Scalar = typename Dot::Scalar;
  const PackedLayout layout = PackedLayout::of(linear.shape, tile_of<Dot>());
  const char* const base = static_cast<const char*>(linear.packed);
  alignas(64) Scalar sums[tuning::kRowBlock * kWidth];
  for (int64_t panel = begin; panel < end; ++panel) {
    const char* const weights = base + sizeof(PackedHeader) + panel * layout.panel_bytes;
    // Without in_features, one empty chain: the sums are 0.
    int64_t at = 0;
    do {
      const int64_t left = layout.depth - at;
      const int64_t depth = left < kChainSteps<Dot> ? left : kChainSteps<Dot>;
      const int64_t input_at = at * tile_of<Dot>().input_bytes;
      const char* const part = weights + at * layout.row_bytes;
      if constexpr (kIsGrouped<Dot>) {
        add_groups_to_rows<Dot>(input, input_at, part, depth, at == 0, sums);
      } else {
        add_chain_to_rows<Dot>(input, input_at, part, depth, at == 0, sums);
      }
      at += kChainSteps<Dot>;
    } while (at < layout.depth);

    const int64_t column = panel * kWidth;
    const int64_t left = linear.shape.out_features - column;
    const int count = static_cast<int>(left < kWidth ? left : kWidth);
    Int8Columns columns = {};
    if constexpr (kIsInt8<Dot>) {
      columns = {reinterpret_cast<const float*>(base + layout.scales_at) + column,
                 reinterpret_cast<const int32_t*>(base + layout.offsets_at) + column};
    }
    for (int64_t row = 0; row < input.count; ++row) {
      const float scale = kIsInt8<Dot> ? input.scales[row] : 1.0f;
      finish_row(sums + row * kWidth, row, column, count, scale, columns, output);
    }
  }
}

LinearTile tile(LinearFormat format) {
  LinearTile result = {};
  with_products(format, [&]<class Dot>(Dot) { result = tile_of<Dot>(); });
  return result;
}

void pack(const PackedLinearShape& shape, const float* weight, int64_t out_stride,
          int64_t in_stride, void* packed, int64_t begin, int64_t end) {
  with_products(shape.format, [&]<class Dot>(Dot) {
    constexpr LinearTile kTile = tile_of<Dot>();
    const PackedLayout layout = PackedLayout::of(shape, kTile);
    const int64_t first = begin * kTile.width, last = end * kTile.width;
    if constexpr (!kIsGrouped<Dot>) {
      for (int64_t output = first; output < last; ++output) {
        const float* const row = weight + (output - first) * out_stride;
        pack_output<Dot>(shape, row, in_stride, layout, packed, output);
      }
    } else if constexpr (rounds_floats(Dot::kGrouped)) {
      for (int64_t output = first; output < last; output += kLanes) {
        const float* const rows = weight + (output - first) * out_stride;
        pack_minimum_outputs<Dot>(shape, rows, out_stride, in_stride, layout, packed, output);
      }
    }
  });
}

// The same rows, of which one is rotated in scratch.
LinearInputRows rotated_row(const LinearInputRows& input, int64_t row, uint32_t* largest) {
  *largest = rotate_input(input.x + row * input.row_stride, input.element_stride, input.in_features,
                          input.rotated);
  LinearInputRows rotated = input;
  rotated.x = input.rotated;
  rotated.row_stride = 0;
  rotated.element_stride = 1;
  return rotated;
}

void prepare(const LinearInputRows& input, int64_t begin, int64_t end) {
  with_products(input.format, [&]<class Dot>(Dot) {
    for (int64_t row = begin; row < end; ++row) {
      uint32_t largest = 0;
      const bool is_turned = is_rotated(input.format);
      const LinearInputRows& rows = is_turned ? rotated_row(input, row, &largest) : input;
      if constexpr (kIsGrouped<Dot>) {
        prepare_grouped_row<Dot>(rows, row);
      } else {
        prepare_row<Dot>(rows, row, is_turned ? &largest : nullptr);
      }
    }
  });
}

void multiply(const PackedLinear& linear, const LinearInput& input, const LinearOutput& output,
              int64_t begin, int64_t end) {
  with_products(linear.shape.format,
                [&]<class Dot>(Dot) { multiply_panels<Dot>(linear, input, output, begin, end); });
}

}  // namespace

extern const LinearKernels linear_kernels;
const LinearKernels linear_kernels = {tile, pack, prepare, multiply};

}  // namespace lmdecode::LMD_SIMD::linear
