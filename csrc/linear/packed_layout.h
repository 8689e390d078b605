// The layout of a packed weight.
//
//   PackedHeader                             64 bytes: tells a packed weight from other bytes
//   panels   [panels, depth, width, values]  panels of `width` outputs, padded with 0; along the
//                                            depth groups of `values` elements of in_features,
//                                            padded with 0. With scales of groups: see
//                                            grouped_format.h
//   scales   [panels * width] f32            int8 without groups: of the outputs; NaN where the row
//                                            of W was not finite
//   offsets  [panels * width] int32          likewise: what the sums are too large by (Int8Quads)
//
// Each part has the room that the widest panels and groups need: sizes are the same at every level.
#pragma once

#include "linear/grouped_format.h"

namespace lmdecode::linear {

constexpr uint32_t kPackedMagic = 0x4c444d4c;  // "LMDL"
constexpr int64_t kMaxPanelWidth = 64;
constexpr int64_t kMaxValues = 4;  // but for formats with groups

// How a level multiplies a format.
struct LinearTile {
  int32_t width;   // outputs of a panel; divides kMaxPanelWidth
  int32_t values;  // elements of in_features that one step along the depth takes; as kMaxValues
  int32_t input_bytes;  // of a row of x in one step
};

// Offset added to inputs of kInt8, by the values of a step: products of quads take one factor
// unsigned.
constexpr int32_t int8_input_offset(int32_t values) { return values == 4 ? 128 : 0; }

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
  int64_t row_bytes;  // of one step along the depth
  int64_t panel_bytes;
  int64_t scales_at;
  int64_t offsets_at;
  int64_t bytes;  // a multiple of 64

  [[gnu::always_inline]] static constexpr PackedLayout of(const PackedLinearShape& shape,
                                                          LinearTile tile) {
    PackedLayout layout = {};
    const bool is_int8 = is_int8_row(shape.format);
    layout.panels = rounded_up(shape.out_features, tile.width) / tile.width;
    layout.depth = rounded_up(shape.in_features, tile.values) / tile.values;
    layout.row_bytes = tile.width * bytes_of(shape.format, tile.values);
    layout.panel_bytes = layout.depth * layout.row_bytes;
    const int64_t outputs = rounded_up(shape.out_features, kMaxPanelWidth);
    const int64_t unit =
        is_grouped(shape.format) ? grouped_format(shape.format).step() : kMaxValues;
    layout.scales_at =
        static_cast<int64_t>(sizeof(PackedHeader)) +
        outputs * (rounded_up(shape.in_features, unit) / unit) * bytes_of(shape.format, unit);
    layout.offsets_at = layout.scales_at + (is_int8 ? 4 * outputs : 0);
    layout.bytes = layout.offsets_at + (is_int8 ? 4 * outputs : 0);
    return layout;
  }

 private:
  // Bytes of this many values of one output; of a step, if the format has groups.
  [[gnu::always_inline]] static constexpr int64_t bytes_of(LinearFormat format, int64_t values) {
    if (is_grouped(format)) return grouped_format(format).step_bytes();
    return values * (is_int8_row(format) ? 1 : format == LinearFormat::kBFloat16 ? 2 : 4);
  }

  static constexpr int64_t rounded_up(int64_t size, int64_t unit) {
    return (size + unit - 1) / unit * unit;
  }
};

}  // namespace lmdecode::linear
