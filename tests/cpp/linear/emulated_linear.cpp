// Linear kernels of avx512_amx on emulated tiles in a C interface, for tests/linear/test_tiles.py.
#include <cstdlib>
#include <cstring>
#include <vector>

#include "linear/packed_linear_kernels.h"

LMD_DECLARE_KERNELS_AT(avx512_amx_emulated, linear, extern const LinearKernels linear_kernels;)

using namespace lmdecode::linear;

// y [rows, outputs] = x [rows, inputs] W^T in bfloat16, W [outputs, inputs]; rows <= 144. Whether
// the processor has the vectors that the kernels need; else nothing is written.
extern "C" int lmdecode_emulated_bfloat16(const float* x, const float* weight, float* y,
                                          int64_t rows, int64_t inputs, int64_t outputs) {
  if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vnni")) return 0;
  const LinearKernels& kernels = lmdecode::avx512_amx_emulated::linear::linear_kernels;
  const PackedLinearShape shape = {inputs, outputs, LinearFormat::kBFloat16};
  const LinearTile tile = kernels.tile(shape.format);
  const PackedLayout layout = PackedLayout::of(shape, tile);
  std::vector<char> packed(static_cast<std::size_t>(layout.bytes));
  kernels.pack(shape, weight, inputs, 1, packed.data(), 0, layout.panels);
  const int64_t row_bytes = (layout.depth * tile.input_bytes + 63) / 64 * 64;
  std::vector<char> prepared(static_cast<std::size_t>(rows * row_bytes));
  kernels.prepare(
      {shape.format, x, inputs, 1, inputs, prepared.data(), row_bytes, nullptr, nullptr}, 0, rows);
  LinearOutput output;
  output.y = y;
  output.y_stride = outputs;
  kernels.multiply({shape, packed.data()}, {prepared.data(), nullptr, row_bytes, rows}, output, 0,
                   layout.panels);
  return 1;
}
