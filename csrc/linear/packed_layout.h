// Where things lie in a packed weight.
//
//   PackedHeader                          64 bytes: tells a packed weight from other bytes
//   panels   [panels, depth, width, values]  panels of `width` outputs, padded with 0; along the depth
//                                         groups of `values` elements of in_features, padded with 0
//   scales   [panels * width] f32         kInt8: of the outputs; NaN where the row of W was not finite
//   offsets  [panels * width] int32       kInt8: what the sums are too large by (Int8Quads)
#pragma once

#include "linear/packed_linear.h"

namespace lmdecode {

constexpr uint32_t kPackedMagic = 0x4c444d4c;  // "LMDL"

// How a level multiplies a format.
struct LinearTile {
  int32_t width;        // outputs of a panel
  int32_t values;       // elements of in_features that one step along the depth takes
  int32_t input_bytes;  // of a row of x in one step
};

struct alignas(64) PackedHeader {
  uint32_t magic;
  LinearFormat format;
  LinearTile tile;
  int64_t in_features;
  int64_t out_features;
};

struct PackedLayout {
  int64_t panels;
  int64_t depth;
  int64_t row_bytes;    // of one step along the depth
  int64_t panel_bytes;  // a multiple of 64
  int64_t scales_at;
  int64_t offsets_at;
  int64_t bytes;

  static constexpr PackedLayout of(const PackedLinearShape& shape, LinearTile tile) {
    PackedLayout layout = {};
    const int64_t value_bytes = shape.format == LinearFormat::kFloat32    ? 4
                                : shape.format == LinearFormat::kBFloat16 ? 2
                                                                          : 1;
    layout.panels = (shape.out_features + tile.width - 1) / tile.width;
    layout.depth = (shape.in_features + tile.values - 1) / tile.values;
    layout.row_bytes = tile.width * tile.values * value_bytes;
    layout.panel_bytes = (layout.depth * layout.row_bytes + 63) / 64 * 64;
    layout.scales_at = static_cast<int64_t>(sizeof(PackedHeader)) + layout.panels * layout.panel_bytes;
    const int64_t column_bytes = (layout.panels * tile.width * 4 + 63) / 64 * 64;
    const bool is_int8 = shape.format == LinearFormat::kInt8;
    layout.offsets_at = layout.scales_at + (is_int8 ? column_bytes : 0);
    layout.bytes = layout.offsets_at + (is_int8 ? column_bytes : 0);
    return layout;
  }
};

}  // namespace lmdecode
