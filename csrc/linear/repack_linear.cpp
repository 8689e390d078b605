#include "linear/repack_linear.h"

#include <cstring>

#include "common/parallel.h"
#include "linear/packed_linear_kernels.h"

namespace lmdecode::linear {
namespace {

// A packed weight, as far as its places go.
struct PackedPlaces {
  PackedLinearShape shape;
  LinearTile tile;
  PackedLayout layout;

  PackedPlaces(const PackedLinearShape& s, LinearTile t)
      : shape(s), tile(t), layout(PackedLayout::of(s, t)) {}

  int64_t column(int64_t output) const { return output % tile.width; }
  int64_t panel(int64_t output) const {
    return static_cast<int64_t>(sizeof(PackedHeader)) + output / tile.width * layout.panel_bytes;
  }
  // Element i of an output's row, in formats without groups.
  int64_t value(int64_t output, int64_t i) const {
    const int64_t bytes = layout.row_bytes / (tile.width * tile.values);
    return panel(output) + i / tile.values * layout.row_bytes +
           (column(output) * tile.values + i % tile.values) * bytes;
  }
};

void copy_steps(const PackedPlaces& source, const PackedPlaces& target, int64_t output,
                const char* from, char* to) {
  const GroupedFormat format = grouped_format(source.shape.format);
  const auto cursor = [&](const PackedPlaces& places, auto* bytes, int64_t step) {
    return StepCursor(bytes + places.panel(output) + step * places.layout.row_bytes,
                      places.tile.width, places.column(output));
  };
  GroupedStep step;
  for (int64_t i = 0; i < source.layout.depth; ++i) {
    read_step(format, cursor(source, from, i), &step);
    write_step(format, step, cursor(target, to, i));
  }
}

void copy_values(const PackedPlaces& source, const PackedPlaces& target, int64_t output,
                 const char* from, char* to) {
  const size_t bytes = static_cast<size_t>(source.layout.row_bytes) /
                       static_cast<size_t>(source.tile.width * source.tile.values);
  int32_t sum = 0;
  for (int64_t i = 0; i < source.shape.in_features; ++i) {
    const char* const value = from + source.value(output, i);
    std::memcpy(to + target.value(output, i), value, bytes);
    if (bytes == 1) sum += static_cast<int8_t>(*value);
  }
  if (!is_int8_row(source.shape.format)) return;
  std::memcpy(to + target.layout.scales_at + 4 * output,
              from + source.layout.scales_at + 4 * output, 4);
  const int32_t offset = int8_input_offset(target.tile.values) * sum;
  std::memcpy(to + target.layout.offsets_at + 4 * output, &offset, sizeof(offset));
}

}  // namespace

void repack_linear(const PackedLinearShape& shape, LinearTile tile, const void* from, void* to) {
  const PackedPlaces source(shape, tile);
  const PackedPlaces target(shape, linear_kernels_of(shape.format).tile(shape.format));
  const char* const bytes = static_cast<const char*>(from);
  char* const result = static_cast<char*>(to);
  std::memset(result, 0, static_cast<size_t>(target.layout.bytes));
  PackedHeader header = {};
  std::memcpy(&header, bytes, sizeof(header));
  header.tile = target.tile;
  std::memcpy(result, &header, sizeof(header));
  if (shape.in_features == 0) return;
  parallel_for(shape.out_features, 1 + (1 << 12) / (shape.in_features + 1),
               [&](int64_t begin, int64_t end) {
                 for (int64_t output = begin; output < end; ++output) {
                   if (is_grouped(shape.format)) {
                     copy_steps(source, target, output, bytes, result);
                   } else {
                     copy_values(source, target, output, bytes, result);
                   }
                 }
               });
}

}  // namespace lmdecode::linear
