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

// Panels [begin, end): add(weights, sums) computes the sums of a panel for all rows.
template <class Dot, class Add>
void multiply_panels(const Panels<Dot>& panels, int64_t rows, int64_t begin, int64_t end,
                     const Add& add) {
  alignas(64) typename Dot::Scalar sums[tuning::kRowBlock * Panels<Dot>::kWidth];
  for (int64_t panel = begin; panel < end; ++panel) {
    for_chains<Dot>(panels.layout, panels.at(panel),
                    [&](int64_t input_at, const char* weights, int64_t depth, bool is_first) {
                      add(input_at, weights, depth, is_first, sums);
                    });
    panels.finish(sums, panel, 0, rows);
  }
}

template <class Dot>
void multiply_by_vectors(const Panels<Dot>& panels, const LinearInput& input, int64_t begin,
                         int64_t end) {
  multiply_panels(panels, input.count, begin, end, [&](auto... chain) {
    if constexpr (kIsGrouped<Dot>) {
      add_groups_to_rows<Dot>(input, chain...);
    } else {
      add_chain_to_rows<Dot>(input, chain...);
    }
  });
}

#if defined(LMD_SIMD_AVX512_AMX)
template <class Dot>
void multiply_by_tiles(const Panels<Dot>& panels, const LinearInput& input, int64_t begin,
                       int64_t end) {
  if (input.count == 0) return;
  const RowTiles tiles = RowTiles::of(input);
  if constexpr (!kIsGrouped<Dot>) {
    const TileScope scope(row_tile_config(tiles));
    if (tiles.count == 1) return multiply_few_rows(panels, input, tiles, begin, end);
    return multiply_many_rows(panels, input, tiles, begin, end);
  } else if (input.count <= tuning::kGroupVectorRows) {
    return multiply_by_vectors(panels, input, begin, end);
  } else {
    const TileScope scope(group_tile_config<Dot>(tiles));
    multiply_panels(panels, input.count, begin, end,
                    [&](auto... chain) { add_groups_by_tiles<Dot>(input, tiles, chain...); });
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

LinearRowCut cut([[maybe_unused]] LinearFormat format, [[maybe_unused]] int64_t row_bytes,
                 [[maybe_unused]] int64_t rows) {
#if defined(LMD_SIMD_AVX512_AMX)
  if (!is_grouped(format)) return cut_to_tiles(row_bytes, rows);
#endif
  return {tuning::kRowBlock, 0};
}

void multiply(const PackedLinear& linear, const LinearInput& input, const LinearOutput& output,
              int64_t begin, int64_t end) {
  with_products(linear.shape.format, [&]<class Dot>(Dot) {
    const Panels<Dot> panels(linear, input, output);
#if defined(LMD_SIMD_AVX512_AMX)
    multiply_by_tiles(panels, input, begin, end);
#else
    multiply_by_vectors(panels, input, begin, end);
#endif
  });
}

}  // namespace

extern const LinearKernels linear_kernels;
const LinearKernels linear_kernels = {tile, pack, prepare, cut, multiply};

}  // namespace lmdecode::LMD_SIMD::linear
