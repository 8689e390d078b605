// The kernels of packed_linear at every level against double precision; integers' bits are equal.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "linear/packed_linear_kernels.h"
#include "linear/rotation.h"
#include "tile_order.h"

#if defined(LMD_HAS_AVX512)
LMD_DECLARE_KERNELS_AT(avx512_amx_emulated, linear, extern const LinearKernels linear_kernels;)
#endif

namespace lmdecode::linear {
namespace {

using std::size_t;

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// Aligned to 64, and not a byte longer than asked for: reads behind the end are seen.
template <class T>
class Memory {
 public:
  explicit Memory(int64_t size) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, static_cast<size_t>(size) * sizeof(T)) != 0) std::abort();
    data_.reset(static_cast<T*>(memory));
  }
  T* get() const { return data_.get(); }

 private:
  std::unique_ptr<T, Free> data_;
};

struct Level {
  const char* name;
  const LinearKernels* kernels;
  bool has_floats, has_bfloat16, has_ints;
  bool has_tiles = false;

  bool has(LinearFormat format) const {
    return format == LinearFormat::kFloat32    ? has_floats
           : format == LinearFormat::kBFloat16 ? has_bfloat16
                                               : has_ints;
  }
};

std::vector<Level> levels() {
  std::vector<Level> all = {{"default", &default_::linear::linear_kernels, true, true, true}};
#if defined(LMD_HAS_AVX512)
  const CpuCapability best = max_cpu_capability();
  if (best >= CpuCapability::kAvx2) {
    all.push_back({"avx2", &avx2::linear::linear_kernels, true, true, true});
  }
  if (best >= CpuCapability::kAvx512) {
    all.push_back({"avx512", &avx512::linear::linear_kernels, true, true, true});
    if (__builtin_cpu_supports("avx512bf16")) {
      all.push_back({"avx512_bf16", &avx512_bf16::linear::linear_kernels, false, true, false});
    }
    if (__builtin_cpu_supports("avx512vnni")) {
      all.push_back({"avx512_vnni", &avx512_vnni::linear::linear_kernels, false, false, true});
    }
  }
  if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) {
    const LinearKernels* const emulated = &avx512_amx_emulated::linear::linear_kernels;
    all.push_back({"avx512_amx, emulated", emulated, false, true, true, true});
  }
#if defined(LMD_HAS_AVX512_AMX)
  if (best == CpuCapability::kAmx) {
    all.push_back({"avx512_amx", &avx512_amx::linear::linear_kernels, false, true, true, true});
  }
#endif
#endif
  return all;
}

struct Case {
  int64_t rows, inputs, outputs;
  int64_t out_stride = 0, in_stride = 1;
  int64_t element_stride = 1;
  Activation activation = Activation::kNone;
};

// A random call: its arguments, and what a level makes of them.
class Call {
 public:
  Call(const Case& shape, unsigned seed)
      : shape_(shape),
        out_stride_(shape.out_stride > 0 ? shape.out_stride : shape.inputs),
        weight_(span(shape.outputs, out_stride_, shape.inputs, shape.in_stride)),
        x_(span(shape.rows, shape.inputs * shape.element_stride, shape.inputs,
                shape.element_stride)),
        bias_(shape.outputs),
        residual_(shape.rows * shape.outputs) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](const Memory<float>& memory, int64_t size) {
      for (int64_t i = 0; i < size; ++i) memory.get()[i] = normal(random);
    };
    fill(weight_, span(shape.outputs, out_stride_, shape.inputs, shape.in_stride));
    fill(x_,
         span(shape.rows, shape.inputs * shape.element_stride, shape.inputs, shape.element_stride));
    fill(bias_, shape.outputs);
    fill(residual_, shape.rows * shape.outputs);
  }

  // Panels [0, split) and [split, panels) of rows [0, row_split) and [row_split, rows).
  std::vector<float> run(const LinearKernels& kernels, LinearFormat format, int64_t split = 0,
                         int64_t row_split = 0) const {
    const PackedLinearShape shape = {shape_.inputs, shape_.outputs, format};
    const LinearTile tile = kernels.tile(format);
    const PackedLayout layout = PackedLayout::of(shape, tile);
    const Memory<char> packed(layout.bytes);
    int64_t out_stride = out_stride_, in_stride = shape_.in_stride;
    const float* weight = weight_.get();
    const Memory<float> turned(is_rotated(format) ? shape_.outputs * shape_.inputs : 0);
    if (is_rotated(format)) {
      for (int64_t o = 0; o < shape_.outputs; ++o) {
        float* const row = turned.get() + o * shape_.inputs;
        for (int64_t i = 0; i < shape_.inputs; ++i) row[i] = weight[o * out_stride + i * in_stride];
        rotate_row(row, shape_.inputs);
      }
      weight = turned.get();
      out_stride = shape_.inputs;
      in_stride = 1;
    }
    kernels.pack(shape, weight, out_stride, in_stride, packed.get(), 0, split);
    kernels.pack(shape, weight + split * tile.width * out_stride, out_stride, in_stride,
                 packed.get(), split, layout.panels);
    const int64_t row_stride = shape_.inputs * shape_.element_stride;
    LinearInput input = {x_.get(), nullptr, 4 * row_stride, shape_.rows};
    const int64_t row_bytes = (layout.depth * tile.input_bytes + 63) / 64 * 64;
    // In tiles, if so the level wants them; but one after another where they are split within one.
    const LinearRowCut cut = kernels.cut(format, row_bytes, shape_.rows);
    const int64_t height = row_split == 0 && cut.tile > 0 ? cut.tile : 1;
    const Memory<char> prepared((shape_.rows + height - 1) / height * height * row_bytes);
    const Memory<float> scales(shape_.rows), rotated(shape_.inputs);
    if (format != LinearFormat::kFloat32 || shape_.element_stride != 1) {
      kernels.prepare(
          {format, x_.get(), row_stride, shape_.element_stride, shape_.inputs, prepared.get(),
           row_bytes, scales.get(), rotated.get(), height > 1 ? height : 0},
          0, shape_.rows);
      input = {prepared.get(), scales.get(), row_bytes, shape_.rows, height > 1 ? height : 0};
    }
    const Memory<float> y(shape_.rows * shape_.outputs);
    std::copy_n(residual_.get(), shape_.rows * shape_.outputs, y.get());
    const auto multiply_block = [&](int64_t first, int64_t last) {
      LinearOutput output;
      output.y = y.get() + first * shape_.outputs;  // the residual lies where y goes
      output.y_stride = shape_.outputs;
      output.bias = bias_.get();
      output.activation = shape_.activation;
      output.residual = output.y;
      output.residual_stride = shape_.outputs;
      kernels.multiply({shape, packed.get()}, input.slice(first, last), output, 0, split);
      kernels.multiply({shape, packed.get()}, input.slice(first, last), output, split,
                       layout.panels);
      CHECK(!amx_emulation::in_use());
    };
    const auto multiply = [&](int64_t first, int64_t last) {
      const int64_t most = cut.block / height * height;
      for (; last - first > most; first += most) multiply_block(first, first + most);
      multiply_block(first, last);
    };
    if (row_split > 0) multiply(0, row_split);
    multiply(row_split, shape_.rows);
    return {y.get(), y.get() + shape_.rows * shape_.outputs};
  }

  // Some numbers become others, of x and of the weight.
  void plant(const std::vector<float>& numbers) {
    std::mt19937 random(5);
    for (const float number : numbers) {
      x_.get()[static_cast<int64_t>(random()) % (shape_.rows * shape_.inputs)] = number;
      weight_.get()[static_cast<int64_t>(random()) % (shape_.outputs * shape_.inputs)] = number;
    }
  }

  // y in bfloat16 by the order of the sums of tiles, without an activation.
  std::vector<float> in_order_of_tiles() const {
    std::vector<float> y;
    for (int64_t r = 0; r < shape_.rows; ++r) {
      for (int64_t o = 0; o < shape_.outputs; ++o) {
        const float sum = amx_emulation::sum_in_order_of_tiles(
            x_.get() + r * shape_.inputs * shape_.element_stride, shape_.element_stride,
            weight_.get() + o * out_stride_, shape_.in_stride, shape_.inputs);
        y.push_back((sum + bias_.get()[o]) + residual_.get()[r * shape_.outputs + o]);
      }
    }
    return y;
  }

  // The largest error in units of what rounding may make of f32 or bfloat16 sums.
  double error(const std::vector<float>& y, LinearFormat format) const {
    double worst = 0.0;
    for (int64_t r = 0; r < shape_.rows; ++r) {
      for (int64_t o = 0; o < shape_.outputs; ++o) {
        double sum = 0.0, size = 1.0;
        for (int64_t i = 0; i < shape_.inputs; ++i) {
          float a = x_.get()[(r * shape_.inputs + i) * shape_.element_stride];
          float b = weight_.get()[o * out_stride_ + i * shape_.in_stride];
          if (format == LinearFormat::kBFloat16) {
            a = amx_emulation::rounded_to_bfloat16(a);
            b = amx_emulation::rounded_to_bfloat16(b);
          }
          const double product = static_cast<double>(a) * static_cast<double>(b);
          sum += product;
          size += std::fabs(product);
        }
        sum += static_cast<double>(bias_.get()[o]);
        if (shape_.activation == Activation::kRelu) sum = sum > 0.0 ? sum : 0.0;
        const int64_t at = r * shape_.outputs + o;
        sum += static_cast<double>(residual_.get()[at]);
        const double off = std::fabs(sum - static_cast<double>(y[static_cast<size_t>(at)]));
        worst = std::fmax(worst, off / size);
        if (std::isnan(off)) return off;
      }
    }
    return worst / 1e-6;
  }

 private:
  static int64_t span(int64_t rows, int64_t row_stride, int64_t columns, int64_t column_stride) {
    return rows == 0 || columns == 0 ? 0
                                     : (rows - 1) * row_stride + (columns - 1) * column_stride + 1;
  }

  Case shape_;
  int64_t out_stride_;
  Memory<float> weight_, x_, bias_, residual_;
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Bits of NaN aside.
bool same_numbers(const std::vector<float>& a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size() && a.size() == b.size(); ++i) {
    if (std::isnan(a[i]) ? !std::isnan(b[i]) : std::memcmp(&a[i], &b[i], sizeof(float)) != 0) {
      return false;
    }
  }
  return a.size() == b.size();
}

const Case kCases[] = {
    {1, 1, 1},
    {2, 3, 7},
    {3, 64, 64},
    {4, 65, 63},
    {5, 5, 129},
    {6, 513, 66},
    {7, 1025, 17},
    {13, 40, 80},
    {144, 30, 70},
    {33, 512, 70},
    {17, 513, 70},
    {40, 1024, 70},
    {33, 1025, 70},
    {3, 2050, 9},
    {20, 2400, 70},
    {0, 8, 8},
    {3, 0, 70},
    {21, 0, 70},
    {4, 20, 0},
    {5, 33, 70, 1, 70},
    {5, 33, 70, 80, 2},
    {5, 33, 70, 0, 1, 3},
    {9, 50, 70, 0, 1, 1, Activation::kRelu},
};

// That weights are rounded to from floats.
const LinearFormat kRounded[] = {
    LinearFormat::kInt8,
    LinearFormat::kInt8Rotated,
    LinearFormat::kInt4Minimums32,
    LinearFormat::kInt4Minimums64,
    LinearFormat::kInt4Minimums128,
    LinearFormat::kInt4RotatedMinimums32,
    LinearFormat::kInt4RotatedMinimums64,
    LinearFormat::kInt4RotatedMinimums128,
};

TEST(every_level_multiplies) {
  unsigned seed = 0;
  for (const Case& shape : kCases) {
    const Call call(shape, ++seed);
    for (const Level& level : levels()) {
      for (const LinearFormat format : {LinearFormat::kFloat32, LinearFormat::kBFloat16}) {
        if (!level.has(format)) continue;
        const double error = call.error(call.run(*level.kernels, format), format);
        if (error < 1.0) continue;
        check::report(level.name, static_cast<int>(seed), "error " + std::to_string(error));
      }
    }
  }
}

TEST(ints_have_the_same_bits_at_every_level) {
  for (const LinearFormat format : kRounded) {
    // Two roundings: to a 127th of the largest magnitude, some 4 of which make a normal row; of
    // int4's weights to a 15th of what lies between the least and the largest of a group.
    const double most = (is_int8_row(format) ? 0.05 : 0.3) / 1e-6;
    unsigned seed = 100;
    for (const Case& shape : kCases) {
      const Call call(shape, ++seed);
      const std::vector<float> want = call.run(default_::linear::linear_kernels, format);
      CHECK(call.error(want, format) < most);
      for (const Level& level : levels()) {
        if (level.has(format)) CHECK(same_bits(call.run(*level.kernels, format), want));
      }
    }
  }
}

GroupedStep random_step(const GroupedFormat& format, std::mt19937* random) {
  const auto half = [&] { return static_cast<uint16_t>(0x2800 + (*random)() % 0x800); };
  GroupedStep step;
  step.super_scale = half();
  step.super_minimum = half();
  for (int g = 0; g < format.step_groups(); ++g) {
    const bool is_bfloat16 = format.scales == Scales::kBFloat16;
    step.groups[g].scale = format.is_super() ? static_cast<uint8_t>((*random)() % 256)
                           : is_bfloat16     ? static_cast<uint16_t>(0x3d00 + (*random)() % 0x200)
                                             : half();
    const bool is_half = format.has_minimums() && !format.is_super();
    step.groups[g].offset = is_half ? half() : static_cast<uint8_t>((*random)() % 17);
  }
  const uint32_t codes = format.codes == Codes::kBytes ? 256 : 16;
  for (int i = 0; i < format.step(); ++i) {
    step.codes[i] = static_cast<uint8_t>((*random)() % codes);
  }
  return step;
}

// Rows of x with one element tell each weight at every level; nothing after it is read.
TEST(weights_with_groups_are_what_their_codes_stand_for) {
  for (int64_t number = 0; number <= kMaxLinearFormat; ++number) {
    const LinearFormat kind = static_cast<LinearFormat>(number);
    const GroupedFormat format = grouped_format(kind);
    if (format.group == 0 || is_rotated(kind)) continue;
    const int64_t steps = std::max(2, 384 / format.step()), inputs = steps * format.step();
    const int64_t outputs = 70;
    std::mt19937 random(7);
    std::vector<GroupedStep> weights;
    for (int64_t i = 0; i < outputs * steps; ++i) weights.push_back(random_step(format, &random));
    const PackedLinearShape shape = {inputs, outputs, kind};
    for (const Level& level : levels()) {
      if (!level.has(kind)) continue;
      const LinearTile tile = level.kernels->tile(kind);
      const PackedLayout layout = PackedLayout::of(shape, tile);
      const Memory<char> packed(layout.bytes);
      std::memset(packed.get(), 0, static_cast<size_t>(layout.bytes));
      for (int64_t o = 0; o < outputs; ++o) {
        char* const panel =
            packed.get() + sizeof(PackedHeader) + o / tile.width * layout.panel_bytes;
        for (int64_t s = 0; s < steps; ++s) {
          write_step(format, weights[static_cast<size_t>(o * steps + s)],
                     StepCursor(panel + s * layout.row_bytes, tile.width, o % tile.width));
        }
      }
      // Tiles serve more rows than four.
      const int64_t most = level.has_tiles ? 112 : 1;
      const Memory<float> x(most * inputs), y(most * outputs);
      const int64_t row_bytes = (layout.depth * tile.input_bytes + 63) / 64 * 64;
      const Memory<char> prepared(most * row_bytes);
      for (int64_t first = 0; first < inputs; first += most) {
        for (int64_t k = 0; k < most * inputs; ++k) {
          x.get()[k] = k % inputs == (first + k / inputs) % inputs ? 127.0f : 0.0f;
        }
        level.kernels->prepare(
            {kind, x.get(), inputs, 1, inputs, prepared.get(), row_bytes, nullptr, nullptr}, 0,
            most);
        LinearOutput output;
        output.y = y.get();
        output.y_stride = outputs;
        level.kernels->multiply({shape, packed.get()}, {prepared.get(), nullptr, row_bytes, most},
                                output, 0, layout.panels);
        for (int64_t at_y = 0; at_y < most * outputs; ++at_y) {
          const int64_t i = (first + at_y / outputs) % inputs, o = at_y % outputs;
          const GroupedStep& step = weights[static_cast<size_t>(o * steps + i / format.step())];
          const int at = static_cast<int>(i % format.step()), group = at / format.group;
          const GroupNumbers numbers = group_numbers(format, step, group);
          const int zero = format.has_zeros() ? step.groups[group].offset : format.middle();
          const float whole = static_cast<float>(127 * (format.number(step.codes[at]) - zero));
          CHECK(y.get()[at_y] == std::fmaf(numbers.minimum, 127.0f, whole * numbers.scale));
        }
      }
    }
  }
}

TEST(a_row_does_not_depend_on_what_is_computed_beside_it) {
  for (const Case& shape : {Case{13, 600, 200}, Case{20, 1100, 150}, Case{7, 30, 90}}) {
    const Call call(shape, static_cast<unsigned>(shape.rows));
    for (const Level& level : levels()) {
      for (const LinearFormat format :
           {LinearFormat::kFloat32, LinearFormat::kBFloat16, LinearFormat::kInt8,
            LinearFormat::kInt8Rotated, LinearFormat::kInt4Minimums64}) {
        if (!level.has(format)) continue;
        const std::vector<float> want = call.run(*level.kernels, format);
        for (const int64_t row_split : {1, 2, 3, 4, 5, 6}) {
          CHECK(same_bits(call.run(*level.kernels, format, 1, row_split), want));
        }
      }
    }
  }
}

TEST(tiles_add_bfloat16_in_their_order) {
  std::vector<Case> cases(std::begin(kCases), std::end(kCases));
  std::erase_if(cases, [](const Case& shape) { return shape.activation != Activation::kNone; });
  for (int64_t rows = 1; rows <= 130; ++rows)
    cases.push_back({rows, 40 + rows % 64, 1 + rows % 70});
  cases.push_back({530, 70, 33});
  cases.push_back({290, 1100, 33});
  cases.push_back({40, 1100, 70});
  unsigned seed = 200;
  for (const Case& shape : cases) {
    Call call(shape, ++seed);
    if (shape.rows * shape.inputs * shape.outputs > 0 && shape.in_stride == 1 && seed % 3 == 0) {
      call.plant({1e-40f, -1e-39f, 0x1p-70f, -0x1p-70f, 0x1p-63f, 3e38f, INFINITY, -INFINITY, NAN});
    }
    const std::vector<float> want = call.in_order_of_tiles();
    for (const Level& level : levels()) {
      if (!level.has_tiles) continue;
      if (same_numbers(call.run(*level.kernels, LinearFormat::kBFloat16), want)) continue;
      check::report(level.name, static_cast<int>(shape.rows), "other bits than in order");
    }
  }
}

TEST(tiles_have_the_bits_of_ints_for_every_number_of_rows) {
  for (const LinearFormat format : kRounded) {
    for (int64_t rows = 1; rows <= 169; rows += rows < 36 ? 1 : 19) {
      const Call call({rows, 40 + rows * 7 % 200, 1 + rows * 5 % 140}, static_cast<unsigned>(rows));
      const std::vector<float> want = call.run(default_::linear::linear_kernels, format);
      for (const Level& level : levels()) {
        if (level.has_tiles) CHECK(same_bits(call.run(*level.kernels, format), want));
      }
    }
  }
}

}  // namespace
}  // namespace lmdecode::linear

CHECK_MAIN()
