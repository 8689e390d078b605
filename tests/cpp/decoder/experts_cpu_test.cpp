// The layer of experts at the level amx with emulated tiles: the bits of avx512, or of tiles.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "check.h"
#include "common/parallel.h"
#include "decoder/experts.h"
#include "decoder/experts_kernels.h"
#include "exact_memory.h"
#include "linear/gguf_blocks.h"
#include "linear/packed_linear_kernels.h"
#include "tile_order.h"

// ---- simd/cpu_capability.h, where a test chooses the level

namespace lmdecode {
namespace {

CpuCapability level_in_use = CpuCapability::kDefault;

bool has_vectors_of_amx() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

}  // namespace

CpuCapability cpu_capability() { return level_in_use; }
bool use_avx512_bf16() { return level_in_use >= CpuCapability::kAvx512; }
bool use_avx512_vnni() { return level_in_use >= CpuCapability::kAvx512; }
bool use_avx512_amx() { return level_in_use == CpuCapability::kAmx; }

}  // namespace lmdecode

// ---- the products of the level amx: those of emulated tiles, counted

LMD_DECLARE_KERNELS_AT(avx512_amx_emulated, linear, extern const LinearKernels linear_kernels;)

namespace lmdecode {
namespace {

const linear::LinearKernels& emulated_kernels() {
  return avx512_amx_emulated::linear::linear_kernels;
}
std::atomic<int64_t> tile_products = 0;

}  // namespace

namespace avx512_amx::linear {

const LinearKernels linear_kernels = {
    [](LinearFormat format) { return emulated_kernels().tile(format); },
    [](const PackedLinearShape& shape, const float* weight, int64_t out_stride, int64_t in_stride,
       void* packed, int64_t begin, int64_t end) {
      emulated_kernels().pack(shape, weight, out_stride, in_stride, packed, begin, end);
    },
    [](const LinearInputRows& input, int64_t begin, int64_t end) {
      emulated_kernels().prepare(input, begin, end);
    },
    [](LinearFormat format, int64_t row_bytes, int64_t rows) {
      return emulated_kernels().cut(format, row_bytes, rows);
    },
    [](const PackedLinear& linear, const LinearInput& input, const LinearOutput& output,
       int64_t begin, int64_t end) {
      emulated_kernels().multiply(linear, input, output, begin, end);
      CHECK(!amx_emulation::in_use());
      ++tile_products;
    },
};

}  // namespace avx512_amx::linear

namespace decoder {
namespace {

using linear::GgufType;
using linear::LinearFormat;

constexpr int64_t kExperts = 5, kChosen = 2;

// The weights of the experts: rounded from floats to a format, or the blocks of a file.
struct Weights {
  LinearFormat format = LinearFormat::kFloat32;
  GgufType type = GgufType::kQ4_0;
  bool is_of_file = false;

  static Weights of_floats(LinearFormat format) { return {format, GgufType::kQ4_0, false}; }
  static Weights of_file(GgufType type) { return {linear::gguf_block(type).format, type, true}; }
};

struct Sizes {
  int64_t model, inner;
};

struct Formats {
  Weights up, gate, down;
};

// A layer with its rows of x: the same numbers at every level. Of each row one expert is the first,
// so that it has as many rows as there are; the others share the rest.
class Layer {
 public:
  Layer(const Sizes& sizes, const Formats& formats, int64_t rows, bool is_clamped) : sizes_(sizes) {
    config.count = kExperts;
    config.chosen = kChosen;
    config.size = sizes.inner;
    config.is_normalized = true;
    config.is_clamped = is_clamped;
    config.alpha = 1.702f;
    config.limit = 1.5f;
    x = floats(rows * sizes.model);
    residual = floats(rows * sizes.model);
    for (int64_t row = 0; row < rows; ++row) {
      float* const of_row = x.data() + row * sizes.model;
      of_row[0] += 8.0f;
      of_row[1 + row * 7 % 11 % (kExperts - 1)] += 4.0f;
    }
    router_.assign(static_cast<size_t>(kExperts * sizes.model), 0.0f);
    for (int64_t e = 0; e < kExperts; ++e) router_[e * sizes.model + e] = 1.0f;
    up = matrices(formats.up, sizes.model, sizes.inner);
    gate = matrices(formats.gate, sizes.model, sizes.inner);
    down = matrices(formats.down, sizes.inner, sizes.model);
  }

  // Of the experts' matrices of one kind, before they are packed.
  struct Matrices {
    Weights weights;
    linear::PackedLinearShape shape;
    std::vector<float> values;    // [experts, out, in]
    std::vector<uint8_t> blocks;  // of a file instead
    std::vector<float> bias;      // [experts, out]
  };

  // Matrices as the level in use multiplies them.
  struct Packed {
    explicit Packed(const Matrices& from)
        : stride(static_cast<int64_t>(packed_linear_bytes(from.shape))), memory(kExperts * stride) {
      const int64_t in = from.shape.in_features, out = from.shape.out_features;
      const int64_t row_bytes = static_cast<int64_t>(from.blocks.size()) / (kExperts * out);
      for (int64_t e = 0; e < kExperts; ++e) {
        uint8_t* const to = memory.get() + e * stride;
        if (from.weights.is_of_file) {
          pack_gguf_linear(from.shape, from.weights.type, from.blocks.data() + e * out * row_bytes,
                           row_bytes, to);
        } else {
          pack_linear(from.shape, from.values.data() + e * out * in, in, 1, to);
        }
      }
      matrices.first = {from.shape, memory.get()};
      matrices.stride = stride;
      matrices.bias = from.bias.data();
    }

    int64_t stride;
    Exactly<uint8_t> memory;
    ExpertMatrices matrices;
  };

  // out [rows, model] of the first rows, at the level in use.
  std::vector<float> run(int64_t rows) {
    const linear::PackedLinearShape router = {sizes_.model, kExperts, LinearFormat::kFloat32};
    Exactly<uint8_t> packed_router(static_cast<int64_t>(packed_linear_bytes(router)));
    pack_linear(router, router_.data(), sizes_.model, 1, packed_router.get());
    ExpertsWeights weights;
    weights.router = {router, packed_router.get()};
    const Packed packed_up(up), packed_gate(gate), packed_down(down);
    weights.up = packed_up.matrices;
    weights.gate = packed_gate.matrices;
    weights.down = packed_down.matrices;
    ExpertsParams params;
    params.config = &config;
    params.weights = &weights;
    params.activation = linear::Activation::kRelu;
    params.model_size = sizes_.model;
    params.rows = rows;
    Exactly<float> rows_of_x(rows * sizes_.model), rows_of_residual(rows * sizes_.model);
    std::copy_n(x.data(), rows_of_x.size(), rows_of_x.get());
    std::copy_n(residual.data(), rows_of_x.size(), rows_of_residual.get());
    Exactly<float> out(rows * sizes_.model);
    params.x = rows_of_x.get();
    params.residual = rows_of_residual.get();
    params.out = out.get();
    ExpertsBuffers buffers;
    const size_t bytes = split_experts_buffers(config, sizes_.model, rows, nullptr, &buffers);
    Exactly<uint8_t> workspace(static_cast<int64_t>(bytes), 255);
    split_experts_buffers(config, sizes_.model, rows, workspace.get(), &buffers);
    experts_cpu(params, buffers);
    experts.assign(buffers.experts, buffers.experts + rows * kChosen);
    choice_weights.assign(buffers.weights, buffers.weights + rows * kChosen);
    return {out.get(), out.get() + out.size()};
  }

  ExpertsConfig config;
  std::vector<float> x, residual;
  Matrices up, gate, down;
  std::vector<int32_t> experts;       // [rows, chosen] of the last run
  std::vector<float> choice_weights;  // likewise

 private:
  std::vector<float> floats(int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = random_.next();
    return values;
  }

  Matrices matrices(const Weights& weights, int64_t in, int64_t out) {
    Matrices m;
    m.weights = weights;
    m.shape = {in, out, weights.format};
    m.bias = floats(kExperts * out);
    m.values = floats(kExperts * out * in);
    if (!weights.is_of_file) return m;
    const int64_t bytes = linear::gguf_block(weights.type).bytes;
    m.blocks.resize(static_cast<size_t>(kExperts * out * (in / 32) * bytes));
    for (size_t i = 0; i < m.blocks.size(); ++i) {
      m.blocks[i] = static_cast<uint8_t>(128.0f + 127.0f * random_.next());
    }
    for (size_t i = 0; i < m.blocks.size(); i += static_cast<size_t>(bytes)) {
      if (weights.type == GgufType::kMXFP4) {
        m.blocks[i] = 120 + m.blocks[i] % 8;  // powers of two
      } else {
        m.blocks[i + 1] = 0x20 + m.blocks[i + 1] % 8;  // the larger half of a float16
      }
    }
    return m;
  }

  const Sizes sizes_;
  std::vector<float> router_;
  Random random_;
};

bool same_bits(const std::vector<float>& some, const std::vector<float>& all) {
  return some.size() <= all.size() &&
         std::memcmp(some.data(), all.data(), some.size() * sizeof(float)) == 0;
}

bool is_finite(const std::vector<float>& values) {
  for (const float value : values) {
    if (!std::isfinite(value)) return false;
  }
  return true;
}

const Sizes kSizes[] = {{33, 65}, {70, 37}, {97, 67}};
// kMoreRows: more than are multiplied together with groups; kMostRows: without.
constexpr int64_t kRows = 40, kMoreRows = 150, kMostRows = 530;

// By tiles, for any number of rows of an expert, with one and with two threads: rows of `want`.
void check_tiles(Layer* layer, const Sizes& sizes, const std::vector<float>& want,
                 const char* what) {
  level_in_use = CpuCapability::kAmx;
  CHECK(is_finite(want));
  const int64_t most = static_cast<int64_t>(want.size()) / sizes.model;
  for (const int threads : {1, 2}) {
    torch::stable::num_threads = threads;
    for (int64_t rows = 1; rows <= most; rows = rows == kRows && most > kRows ? most : rows + 1) {
      tile_products = 0;
      const std::vector<float> got = layer->run(rows);
      CHECK(tile_products > 0);
      int64_t of_first = 0;
      for (const int32_t expert : layer->experts) of_first += expert == 0;
      CHECK_EQ(of_first, rows);
      if (same_bits(got, want)) continue;
      check::report(what, static_cast<int>(rows),
                    "other bits than expected with threads: " + std::to_string(threads));
    }
  }
}

// What the layer is by its definition, row by row, for the experts that its last run chose.
// product(matrices, expert, x [in]) -> x W^T + bias [out].
template <class Product>
std::vector<float> by_definition(const Layer& layer, const Sizes& sizes, const Product& product) {
  std::vector<float> out = layer.residual;
  for (size_t i = 0; i < layer.experts.size(); i += kChosen) {
    const int64_t first = static_cast<int64_t>(i) / kChosen * sizes.model;
    std::vector<float> sum(static_cast<size_t>(sizes.model), 0.0f);
    for (size_t at = i; at < i + kChosen; ++at) {
      const int64_t expert = layer.experts[at];
      const std::vector<float> up = product(layer.up, expert, layer.x.data() + first);
      std::vector<float> inner = product(layer.gate, expert, layer.x.data() + first);
      if (layer.config.is_clamped) {
        const auto clamp = LMD_SELECT_KERNEL(decoder, clamp_gates);
        clamp({inner.data(), up.data(), sizes.inner, 1, sizes.inner, layer.config.alpha,
               layer.config.limit});
      } else {
        for (size_t j = 0; j < inner.size(); ++j) inner[j] = std::fmax(inner[j], 0.0f) * up[j];
      }
      const std::vector<float> output = product(layer.down, expert, inner.data());
      for (size_t j = 0; j < sum.size(); ++j) sum[j] += layer.choice_weights[at] * output[j];
    }
    for (size_t j = 0; j < sum.size(); ++j) out[static_cast<size_t>(first) + j] += sum[j];
  }
  return out;
}

// One row and one expert at a time, by the vectors of avx512.
std::vector<float> product_by_vectors(const Layer::Matrices& m, int64_t expert, const float* x) {
  const Layer::Packed packed(m);
  const int64_t in = m.shape.in_features;
  Exactly<uint8_t> memory(static_cast<int64_t>(linear_input_bytes(m.shape.format, in, /*rows=*/1)));
  std::vector<float> y(static_cast<size_t>(m.shape.out_features));
  linear::LinearOutput output;
  output.y = y.data();
  output.y_stride = m.shape.out_features;
  output.bias = packed.matrices.bias_at(expert);
  packed_linear(packed.matrices.at(expert),
                prepare_linear_input(m.shape.format, x, in, 1, in, memory.get()), output);
  return y;
}

// One number at a time.
std::vector<float> product_in_order_of_tiles(const Layer::Matrices& m, int64_t expert,
                                             const float* x) {
  const int64_t in = m.shape.in_features, out = m.shape.out_features;
  std::vector<float> y(static_cast<size_t>(out));
  for (int64_t o = 0; o < out; ++o) {
    const float* const weight = m.values.data() + (expert * out + o) * in;
    y[o] = amx_emulation::sum_in_order_of_tiles(x, 1, weight, 1, in) + m.bias[expert * out + o];
  }
  return y;
}

template <class Product>
void check(const Sizes& sizes, const Formats& formats, bool is_clamped, int64_t rows,
           const char* what, const Product& product) {
  Layer layer(sizes, formats, rows, is_clamped);
  level_in_use = CpuCapability::kAvx512;
  torch::stable::num_threads = 1;
  tile_products = 0;
  layer.run(rows);  // which experts are chosen
  const std::vector<float> want = by_definition(layer, sizes, product);
  CHECK_EQ(tile_products.load(), 0);
  check_tiles(&layer, sizes, want, what);
}

TEST(experts_of_integers_have_the_bits_of_vectors) {
  if (!has_vectors_of_amx()) return;
  const Weights int8 = Weights::of_floats(LinearFormat::kInt8);
  const Weights rotated8 = Weights::of_floats(LinearFormat::kInt8Rotated);
  const Weights int4 = Weights::of_floats(LinearFormat::kInt4Minimums32);
  const Weights rotated4 = Weights::of_floats(LinearFormat::kInt4RotatedMinimums64);
  const Weights microscaled = Weights::of_file(GgufType::kMXFP4);
  const Weights q4_0 = Weights::of_file(GgufType::kQ4_0);
  const auto& product = product_by_vectors;
  for (const Sizes& sizes : kSizes) {
    const bool has_more = sizes.model < 70;
    check(sizes, {int8, int8, int8}, false, has_more ? kMostRows : kRows, "int8", product);
    check(sizes, {int4, int4, int4}, true, has_more ? kMoreRows : kRows, "int4", product);
    check(sizes, {rotated4, rotated4, rotated8}, true, kRows, "rotated", product);
    check(sizes, {int4, int8, int8}, false, kRows, "int4 and int8", product);
  }
  check({64, 96}, {microscaled, microscaled, microscaled}, true, kRows, "MXFP4", product);
  check({96, 64}, {q4_0, q4_0, q4_0}, false, kRows, "Q4_0", product);
}

TEST(experts_of_bfloat16_have_the_order_of_tiles) {
  if (!has_vectors_of_amx()) return;
  const Weights bfloat16 = Weights::of_floats(LinearFormat::kBFloat16);
  for (const Sizes& sizes : kSizes) {
    for (const bool is_clamped : {false, true}) {
      check(sizes, {bfloat16, bfloat16, bfloat16}, is_clamped, sizes.model < 70 ? kMostRows : kRows,
            "bfloat16", product_in_order_of_tiles);
    }
  }
}

}  // namespace
}  // namespace decoder
}  // namespace lmdecode

CHECK_MAIN()
