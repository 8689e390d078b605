// Panels and blocks of rows to threads.
#include <algorithm>
#include <cstring>

#include "common/float_mode.h"
#include "common/half.h"
#include "common/parallel_rows.h"
#include "linear/gguf_blocks.h"
#include "linear/linear_tuning.h"
#include "linear/packed_linear_kernels.h"
#include "linear/rotation.h"

namespace lmdecode::linear {
namespace {

using namespace tuning;

size_t rounded_up(int64_t bytes) { return static_cast<size_t>((bytes + 63) / 64 * 64); }

PackedLayout layout_of(const PackedLinearShape& shape) {
  return PackedLayout::of(shape, linear_kernels_of(shape.format).tile(shape.format));
}

int64_t input_row_bytes(LinearFormat format, int64_t in_features) {
  const LinearTile tile = linear_kernels_of(format).tile(format);
  const int64_t depth = (in_features + tile.values - 1) / tile.values;
  return static_cast<int64_t>(rounded_up(depth * tile.input_bytes));
}

// Rows [begin, end) of an output.
LinearOutput rows_of(const LinearOutput& output, int64_t begin) {
  LinearOutput rows = output;
  rows.y += begin * output.y_stride;
  if (output.multiplier != nullptr) rows.multiplier += begin * output.multiplier_stride;
  if (output.residual != nullptr) rows.residual += begin * output.residual_stride;
  return rows;
}

// The block-th of `blocks` parts, of about the same size, of the rows; of pairs of tiles, where
// rows lie in tiles.
void multiply_block(const LinearKernels& kernels, const PackedLinear& linear,
                    const LinearInput& input, const LinearOutput& output, int64_t block,
                    int64_t blocks, int64_t begin, int64_t end) {
  const int64_t unit = input.tile_rows > 0 ? 2 * input.tile_rows : 1;
  const int64_t units = (input.count + unit - 1) / unit, first = units * block / blocks * unit;
  const int64_t last = std::min(input.count, units * (block + 1) / blocks * unit);
  kernels.multiply(linear, input.slice(first, last), rows_of(output, first), begin, end);
}

// The most parts in which rows of x are prepared, each with scratch for one rotated row.
int64_t prepared_parts(int64_t rows) {
  return std::min<int64_t>(kPreparedParts, (rows + kPreparedRows - 1) / kPreparedRows);
}

int64_t row_blocks(LinearFormat format, const LinearInput& input) {
  const int64_t most = linear_kernels_of(format).cut(format, input.row_bytes, input.count).block;
  return (input.count + most - 1) / most;
}

}  // namespace

size_t packed_linear_bytes(const PackedLinearShape& shape) {
  return static_cast<size_t>(layout_of(shape).bytes);
}

namespace {

// The header, and 0 where no panel lies: the same weight gives the same bytes.
void write_header(const PackedLinearShape& shape, void* packed) {
  const PackedLayout layout = layout_of(shape);
  char* const base = static_cast<char*>(packed);
  std::memset(base, 0, sizeof(PackedHeader));
  PackedHeader* const header = static_cast<PackedHeader*>(packed);
  header->magic = kPackedMagic;
  header->format = shape.format;
  header->tile = linear_kernels_of(shape.format).tile(shape.format);
  header->in_features = shape.in_features;
  header->out_features = shape.out_features;
  const int64_t panels_end =
      static_cast<int64_t>(sizeof(PackedHeader)) + layout.panels * layout.panel_bytes;
  std::memset(base + panels_end, 0, static_cast<size_t>(layout.bytes - panels_end));
}

double pack_nanoseconds(const PackedLayout& layout) {
  return 1.0 + tuning::kPackNanosecondsPerByte * static_cast<double>(layout.panel_bytes);
}

// pack_panels(kernels, begin, end) packs the panels of that range.
template <class PackPanels>
void pack_with(const PackedLinearShape& shape, void* packed, const PackPanels& pack_panels) {
  write_header(shape, packed);
  const LinearKernels& kernels = linear_kernels_of(shape.format);
  const PackedLayout layout = layout_of(shape);
  parallel_rows(layout.panels, pack_nanoseconds(layout),
                [&](int64_t begin, int64_t end) { pack_panels(kernels, begin, end); });
}

}  // namespace

void pack_linear(const PackedLinearShape& shape, const float* weight, int64_t out_stride,
                 int64_t in_stride, void* packed) {
  const int64_t width = linear_kernels_of(shape.format).tile(shape.format).width;
  const int64_t size = shape.in_features;
  if (!is_rotated(shape.format)) {
    return pack_with(shape, packed, [&](const LinearKernels& kernels, int64_t begin, int64_t end) {
      const float* const first = weight + begin * width * out_stride;
      kernels.pack(shape, first, out_stride, in_stride, packed, begin, end);
    });
  }
  write_header(shape, packed);
  const LinearKernels& kernels = linear_kernels_of(shape.format);
  const PackedLayout layout = layout_of(shape);
  parallel_rows("pack_linear", layout.panels, pack_nanoseconds(layout),
                static_cast<size_t>(4 * width * size + 64),
                [&](int64_t begin, int64_t end, void* memory) {
                  float* const rows = static_cast<float*>(memory);
                  for (int64_t panel = begin; panel < end; ++panel) {
                    for (int64_t i = 0; i < width && panel * width + i < shape.out_features; ++i) {
                      const float* const from = weight + (panel * width + i) * out_stride;
                      float* const row = rows + i * size;
                      for (int64_t e = 0; e < size; ++e) row[e] = from[e * in_stride];
                      rotate_row(row, size);
                    }
                    kernels.pack(shape, rows, size, 1, packed, panel, panel + 1);
                  }
                });
}

namespace {

// read_step(output, step, to) gives the steps of a weight that is packed as it is.
template <class ReadStep>
void pack_steps(const PackedLinearShape& shape, void* packed, const ReadStep& read_step) {
  const GroupedFormat format = grouped_format(shape.format);
  const PackedLayout layout = layout_of(shape);
  pack_with(shape, packed, [&](const LinearKernels& kernels, int64_t begin, int64_t end) {
    const int64_t width = kernels.tile(shape.format).width;
    char* const panels = static_cast<char*>(packed) + sizeof(PackedHeader);
    for (int64_t output = begin * width; output < end * width; ++output) {
      char* step = panels + output / width * layout.panel_bytes;
      for (int64_t i = 0; i < layout.depth; ++i, step += layout.row_bytes) {
        GroupedStep values;
        if (output < shape.out_features) read_step(output, i, &values);
        write_step(format, values, StepCursor(step, width, output % width));
      }
    }
  });
}

}  // namespace

void pack_quantized_linear(const PackedLinearShape& shape, const QuantizedWeight& weight,
                           void* packed) {
  const int64_t size = grouped_format(shape.format).group;
  const uint8_t middle = static_cast<uint8_t>(grouped_format(LinearFormat::kInt4).middle());
  const int64_t groups = (shape.in_features + size - 1) / size;
  pack_steps(shape, packed, [&](int64_t output, int64_t i, GroupedStep* step) {
    const int64_t at = output * groups + i;
    step->groups[0].scale = weight.scales[at].bits;
    step->groups[0].offset = weight.zeros == nullptr ? middle : weight.zeros[at];
    std::memcpy(step->codes, weight.values + output * shape.in_features + i * size,
                static_cast<size_t>(size));
  });
}

void pack_gguf_linear(const PackedLinearShape& shape, GgufType type, const uint8_t* blocks,
                      int64_t row_stride, void* packed) {
  const int64_t bytes = gguf_block(type).bytes;
  pack_steps(shape, packed, [&](int64_t output, int64_t i, GroupedStep* step) {
    read_gguf_block(type, blocks + output * row_stride + i * bytes, step);
  });
}

void dequantize_gguf(GgufType type, const uint8_t* blocks, int64_t row_stride, int64_t rows,
                     int64_t row_blocks, float* values) {
  const GroupedFormat format = grouped_format(gguf_block(type).format);
  const int64_t size = format.step(), bytes = gguf_block(type).bytes;
  parallel_for(rows, 1 + (1 << 14) / (row_blocks * size + 1), [&](int64_t begin, int64_t end) {
    const ScopedIeeeMode ieee;
    GroupedStep step;
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t i = 0; i < row_blocks; ++i) {
        read_gguf_block(type, blocks + row * row_stride + i * bytes, &step);
        float* const to = values + (row * row_blocks + i) * size;
        for (int e = 0; e < size; ++e) to[e] = grouped_value(format, step, e);
      }
    }
  });
}

namespace {

void read_grouped_row(const PackedLinear& linear, const LinearTile& tile, const char* panel,
                      int64_t column, float* row) {
  const GroupedFormat format = grouped_format(linear.shape.format);
  const PackedLayout layout = PackedLayout::of(linear.shape, tile);
  GroupedStep step;
  for (int64_t i = 0; i < layout.depth; ++i, panel += layout.row_bytes) {
    read_step(format, StepCursor(panel, tile.width, column), &step);
    const int64_t first = i * format.step();
    const int64_t count = std::min<int64_t>(format.step(), linear.shape.in_features - first);
    for (int e = 0; e < count; ++e) row[first + e] = grouped_value(format, step, e);
  }
}

}  // namespace

void read_packed_row(const PackedLinear& linear, int64_t output, float* row) {
  const LinearFormat format = linear.shape.format;
  const LinearTile tile = linear_kernels_of(format).tile(format);
  const PackedLayout layout = PackedLayout::of(linear.shape, tile);
  const char* const base = static_cast<const char*>(linear.packed);
  const char* const panel = base + sizeof(PackedHeader) + output / tile.width * layout.panel_bytes;
  const int64_t first = output % tile.width * tile.values, step = tile.width * tile.values;
  const auto read = [&](const auto* values, const auto& value_of) {
    const auto* from = values + first;
    for (int64_t i = 0; i < linear.shape.in_features; i += tile.values, from += step) {
      const int64_t left = linear.shape.in_features - i;
      const int64_t count = left < tile.values ? left : tile.values;
      for (int64_t k = 0; k < count; ++k) row[i + k] = value_of(from[k]);
    }
  };
  if (is_grouped(format)) {
    read_grouped_row(linear, tile, panel, output % tile.width, row);
  } else if (format == LinearFormat::kFloat32) {
    read(reinterpret_cast<const float*>(panel), [](float value) { return value; });
  } else if (format == LinearFormat::kBFloat16) {
    read(reinterpret_cast<const BFloat16*>(panel), [](BFloat16 value) { return to_float(value); });
  } else {
    const float scale = reinterpret_cast<const float*>(base + layout.scales_at)[output];
    read(reinterpret_cast<const int8_t*>(panel),
         [&](int8_t value) { return static_cast<float>(value) * scale; });
  }
  if (is_rotated(format)) rotate_row(row, linear.shape.in_features);
}

size_t linear_input_bytes(LinearFormat format, int64_t in_features, int64_t rows,
                          int64_t element_stride) {
  if (format == LinearFormat::kFloat32 && element_stride == 1) return 0;
  const int64_t row_bytes = input_row_bytes(format, in_features);
  const int64_t tile = linear_kernels_of(format).cut(format, row_bytes, rows).tile;
  const int64_t filled_rows = tile > 0 ? (rows + tile - 1) / tile * tile : rows;
  const size_t scales = is_int8_row(format) ? rounded_up(4 * rows) : 0;
  const size_t parts = is_rotated(format) ? static_cast<size_t>(prepared_parts(rows)) : 0;
  return scales + parts * rounded_up(4 * in_features) +
         static_cast<size_t>(filled_rows * row_bytes);
}

size_t most_linear_input_bytes(int64_t in_features, int64_t rows) {
  size_t most = 0;
  for (int64_t format = 0; format <= kMaxLinearFormat; ++format) {
    most =
        std::max(most, linear_input_bytes(static_cast<LinearFormat>(format), in_features, rows, 1));
  }
  return most;
}

LinearInput prepare_linear_input(LinearFormat format, const float* x, int64_t row_stride,
                                 int64_t rows, int64_t in_features, void* memory,
                                 int64_t element_stride) {
  if (format == LinearFormat::kFloat32 && element_stride == 1) {
    return {x, nullptr, 4 * row_stride, rows};
  }
  LinearInputRows input = {};
  input.format = format;
  input.x = x;
  input.row_stride = row_stride;
  input.element_stride = element_stride;
  input.in_features = in_features;
  input.row_bytes = input_row_bytes(format, in_features);
  input.tile_rows = linear_kernels_of(format).cut(format, input.row_bytes, rows).tile;
  input.rows = static_cast<char*>(memory);
  if (is_int8_row(format)) {
    input.scales = static_cast<float*>(memory);
    input.rows += rounded_up(4 * rows);
  }
  const int64_t parts = prepared_parts(rows);
  char* const rotated = input.rows;
  const size_t rotated_bytes = is_rotated(format) ? rounded_up(4 * in_features) : 0;
  input.rows += static_cast<size_t>(parts) * rotated_bytes;
  const LinearKernels& kernels = linear_kernels_of(format);
  const double nanoseconds = 1.0 + kNanosecondsPerPreparedElement *
                                       static_cast<double>(in_features * rows) /
                                       static_cast<double>(parts > 0 ? parts : 1);
  const auto prepare = [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      LinearInputRows own = input;
      own.rotated = reinterpret_cast<float*>(rotated + static_cast<size_t>(part) * rotated_bytes);
      kernels.prepare(own, rows * part / parts, rows * (part + 1) / parts);
    }
  };
  parallel_rows(parts, nanoseconds, prepare, tuning::kTaskNanoseconds);
  return {input.rows, input.scales, input.row_bytes, rows, input.tile_rows};
}

namespace {

// Time of a panel for each row of x, its weights in the cache.
double row_nanoseconds_of_panel(const PackedLinearShape& shape, const PackedLayout& layout) {
  if (!is_grouped(shape.format)) {
    return static_cast<double>(layout.panel_bytes) / kProductBytesPerNanosecond;
  }
  const int64_t width = linear_kernels_of(shape.format).tile(shape.format).width;
  return static_cast<double>(shape.in_features * width) / kGroupProductsPerNanosecond;
}

}  // namespace

int64_t packed_linear_panels(const PackedLinearShape& shape) { return layout_of(shape).panels; }

void packed_linear_range(const PackedLinear& linear, const LinearInput& input,
                         const LinearOutput& output, int64_t begin, int64_t end) {
  const LinearKernels& kernels = linear_kernels_of(linear.shape.format);
  const int64_t blocks = row_blocks(linear.shape.format, input);
  for (int64_t block = 0; block < blocks; ++block) {
    multiply_block(kernels, linear, input, output, block, blocks, begin, end);
  }
}

namespace {

// multiply(block, blocks, first, last) for the panels [first, last) of each block of rows, on
// torch's threads; `products` of this shape at a time.
template <class Multiply>
void for_blocks(const PackedLinearShape& shape, const LinearInput& input, int products,
                const Multiply& multiply) {
  const PackedLayout layout = layout_of(shape);
  const int64_t blocks = row_blocks(shape.format, input);
  if (blocks == 0) return;
  const double rows_of_block = static_cast<double>(input.count) / static_cast<double>(blocks);
  const double panel_bytes = static_cast<double>(layout.panel_bytes);
  const double row_nanoseconds = row_nanoseconds_of_panel(shape, layout);
  const double panel_nanoseconds =
      1.0 +
      products * std::max(panel_bytes / kWeightBytesPerNanosecond, row_nanoseconds * rows_of_block);
  // Tasks are numbered block by block, panel by panel.
  parallel_rows(
      blocks * layout.panels, panel_nanoseconds,
      [&](int64_t begin, int64_t end) {
        while (begin < end) {
          const int64_t block = begin / layout.panels, first = begin % layout.panels;
          const int64_t last = std::min(layout.panels, first + end - begin);
          multiply(block, blocks, first, last);
          begin += last - first;
        }
      },
      tuning::kTaskNanoseconds);
}

}  // namespace

void packed_linear(const PackedLinear& linear, const LinearInput& input,
                   const LinearOutput& output) {
  const LinearKernels& kernels = linear_kernels_of(linear.shape.format);
  for_blocks(linear.shape, input, 1,
             [&](int64_t block, int64_t blocks, int64_t first, int64_t last) {
               multiply_block(kernels, linear, input, output, block, blocks, first, last);
             });
}

void packed_linear_pair(const PackedLinear& first, const LinearOutput& first_output,
                        const PackedLinear& second, const LinearOutput& second_output,
                        const LinearInput& input) {
  const LinearKernels& kernels = linear_kernels_of(first.shape.format);
  for_blocks(first.shape, input, 2, [&](int64_t block, int64_t blocks, int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      multiply_block(kernels, first, input, first_output, block, blocks, panel, panel + 1);
      multiply_block(kernels, second, input, second_output, block, blocks, panel, panel + 1);
    }
  });
}

}  // namespace lmdecode::linear
