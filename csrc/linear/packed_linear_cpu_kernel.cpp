// Compiled once for each CPU capability, with LMD_SIMD naming it.
#include <type_traits>

#include "linear/linear_epilogue.h"
#include "linear/linear_pack.h"
#include "linear/linear_tiles.h"
#include "linear/packed_linear_kernels.h"
#if defined(LMD_SIMD_AVX512_AMX)
#include "linear/linear_matrix_tiles.h"
#endif

namespace lmdecode::LMD_SIMD::linear {

using namespace lmdecode::linear;

namespace {

// Steps along the depth that all rows pass over before the next.
template <class Dot>
constexpr int64_t kChainSteps = [] {
  if constexpr (kIsGrouped<Dot>) return tuning::kGroupChainElements / Dot::kGrouped.step();
  if constexpr (std::is_same_v<Dot, Floats>) return kFloatChainLength;
  return kChainLength;
}();

// add(input_at, weights, depth, is_first) for the chains of a panel. Without in_features, one empty
// chain: the sums are 0.
template <class Dot, class Add>
void for_chains(const PackedLayout& layout, const char* weights, const Add& add) {
  int64_t at = 0;
  do {
    const int64_t left = layout.depth - at;
    const int64_t depth = left < kChainSteps<Dot> ? left : kChainSteps<Dot>;
    add(at * tile_of<Dot>().input_bytes, weights + at * layout.row_bytes, depth, at == 0);
    at += kChainSteps<Dot>;
  } while (at < layout.depth);
}

// Panels [begin, end): add(layout, weights, sums) computes the sums of a panel, a row at
// place(row).
template <class Dot, class Add, class Place>
void multiply_panels(const PackedLinear& linear, const LinearInput& input,
                     const LinearOutput& output, int64_t begin, int64_t end, const Add& add,
                     const Place& place) {
  constexpr int64_t kWidth = tile_of<Dot>().width;
  using Scalar = typename Dot::Scalar;
  const PackedLayout layout = PackedLayout::of(linear.shape, tile_of<Dot>());
  const char* const base = static_cast<const char*>(linear.packed);
  alignas(64) Scalar sums[tuning::kRowBlock * kWidth];
  for (int64_t panel = begin; panel < end; ++panel) {
    add(layout, base + sizeof(PackedHeader) + panel * layout.panel_bytes, sums);
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
      finish_row(sums + place(row) * kWidth, row, column, count, scale, columns, output);
    }
  }
}

template <class Dot>
void multiply_panels(const PackedLinear& linear, const LinearInput& input,
                     const LinearOutput& output, int64_t begin, int64_t end) {
  const auto add_to_rows = [&](const PackedLayout& layout, const char* panel,
                               typename Dot::Scalar* sums) {
    for_chains<Dot>(layout, panel,
                    [&](int64_t input_at, const char* weights, int64_t depth, bool is_first) {
                      if constexpr (kIsGrouped<Dot>) {
                        add_groups_to_rows<Dot>(input, input_at, weights, depth, is_first, sums);
                      } else {
                        add_chain_to_rows<Dot>(input, input_at, weights, depth, is_first, sums);
                      }
                    });
  };
  multiply_panels<Dot>(linear, input, output, begin, end, add_to_rows,
                       [](int64_t row) { return row; });
}

#if defined(LMD_SIMD_AVX512_AMX)
template <class Dot>
void multiply_panels_by_tiles(const PackedLinear& linear, const LinearInput& input,
                              const LinearOutput& output, int64_t begin, int64_t end) {
  static_assert(tuning::kRowBlock % kMatrixTileRows == 0, "sums for fewer rows than tiles have");
  if (input.count == 0) return;
  const RowTiles tiles = RowTiles::of(input.count);
  if constexpr (kIsGrouped<Dot>) {
    if (input.count <= tuning::kGroupVectorRows) {
      return multiply_panels<Dot>(linear, input, output, begin, end);
    }
    const TileScope scope(group_tile_config<Dot>(tiles));
    const auto add = [&](const PackedLayout& layout, const char* panel, float* sums) {
      for_chains<Dot>(
          layout, panel, [&](int64_t input_at, const char* weights, int64_t depth, bool is_first) {
            add_groups_by_tiles<Dot>(input, tiles, input_at, weights, depth, is_first, sums);
          });
    };
    multiply_panels<Dot>(linear, input, output, begin, end, add, [](int64_t row) { return row; });
  } else {
    const TileScope scope(row_tile_config(tiles));
    const auto add = [&](const PackedLayout& layout, const char* panel,
                         typename Dot::Scalar* sums) {
      add_panel_by_tiles<Dot>(input, tiles, panel, layout.depth, sums);
    };
    multiply_panels<Dot>(linear, input, output, begin, end, add,
                         [&](int64_t row) { return tiles.place(row); });
  }
}
#endif

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

// The same rows, one of them rotated in scratch.
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
  with_products(linear.shape.format, [&]<class Dot>(Dot) {
#if defined(LMD_SIMD_AVX512_AMX)
    multiply_panels_by_tiles<Dot>(linear, input, output, begin, end);
#else
                  multiply_panels<Dot>(linear, input, output, begin, end);
#endif
  });
}

}  // namespace

extern const LinearKernels linear_kernels;
const LinearKernels linear_kernels = {tile, pack, prepare, multiply};

}  // namespace lmdecode::LMD_SIMD::linear
