// The ops of packed weights, on CPU tensors alone.
#include "linear/packed_linear.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <new>
#include <tuple>

#include "bindings/packed_weight_checks.h"
#include "bindings/tensor_rows.h"
#include "common/huge_pages.h"
#include "common/parallel_rows.h"
#include "linear/gguf_blocks.h"
#include "linear/repack_linear.h"

namespace lmdecode::linear {
namespace {

constexpr char kPackOp[] = "pack_linear";
constexpr char kPackQuantizedOp[] = "pack_quantized_linear";
constexpr char kPackGgufOp[] = "pack_gguf_linear";
constexpr char kDequantizeGgufOp[] = "dequantize_gguf";
constexpr char kRepackOp[] = "repack_linear";
constexpr char kUnpackOp[] = "unpack_linear";
constexpr char kLinearOp[] = "packed_linear";
constexpr char kRowsOp[] = "packed_linear_rows";
constexpr char kBatchedOp[] = "batched_matmul";

LinearFormat checked_format(const char* op, int64_t format) {
  if (format < 0 || format > kMaxLinearFormat) {
    fail(op, "format is ", format, "; expected 0 to ", kMaxLinearFormat,
         ", a number of csrc/linear/packed_linear.h");
  }
  return static_cast<LinearFormat>(format);
}

PackedLinearShape checked_shape(const char* op, int64_t in_features, int64_t out_features,
                                int64_t format) {
  const LinearFormat checked = checked_format(op, format);
  if (in_features < 0 || out_features < 0) {
    fail(op, "the weight has shape [", out_features, ", ", in_features,
         "]; expected no negative size");
  }
  if (is_int8_row(checked) && in_features > kMaxInt8Features) {
    fail(op, "weight has ", in_features, " input features; expected at most ", kMaxInt8Features,
         " for int8");
  }
  // So that sizes in bytes do not overflow.
  constexpr int64_t kMostElements = int64_t{1} << 48;
  if (out_features >= kMostElements || in_features > kMostElements / (out_features + 64)) {
    fail(op, "the weight has shape [", out_features, ", ", in_features,
         "]; expected fewer than 2^48 elements");
  }
  return {in_features, out_features, checked};
}

// Frees the allocation that stands before a packed weight.
void free_packed(void* packed) { std::free(static_cast<void**>(packed)[-1]); }

// Memory for a packed weight: on huge pages as far as it fills them, so that a model takes no more
// memory than its weights have bytes. posix_memalign of glibc before 2.38 cannot place a block
// where one of its size was freed: weights packed again and again would take new memory each time.
Tensor new_packed(size_t bytes) {
  const size_t alignment = bytes >= kHugePage ? kHugePage : 64;
  void* const allocation = std::malloc(bytes + alignment + sizeof(void*));
  if (allocation == nullptr) throw std::bad_alloc();
  const uintptr_t first = reinterpret_cast<uintptr_t>(allocation) + sizeof(void*);
  void* const memory = reinterpret_cast<void*>((first + alignment - 1) / alignment * alignment);
  static_cast<void**>(memory)[-1] = allocation;
  if (bytes >= kHugePage) advise_huge_pages(memory, bytes / kHugePage * kHugePage);
  const int64_t sizes[] = {static_cast<int64_t>(bytes)}, strides[] = {1};
  return torch::stable::from_blob(memory, {sizes, 1}, {strides, 1},
                                  torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                  ScalarType::Byte, &free_packed);
}

// Throws unless a packed weight of this shape may be written to it.
void check_packed_out(const char* op, const Tensor& out, const PackedLinearShape& shape) {
  const int64_t bytes = static_cast<int64_t>(packed_linear_bytes(shape));
  check_dtype(op, "out", out, ScalarType::Byte);
  if (out.dim() == 1 && out.size(0) == bytes && out.is_cpu() && out.is_contiguous() &&
      reinterpret_cast<uintptr_t>(out.const_data_ptr()) % 64 == 0) {
    return;
  }
  fail(op, "out has shape ", shape_text(out), " on ", device_name(out), "; expected [", bytes,
       "], contiguous, on cpu, aligned to 64");
}

PackedLinearShape checked_floats(const Tensor& weight, int64_t format) {
  check_rank(kPackOp, "weight", weight, 2, "[out_features, in_features]");
  Arguments(kPackOp).strided<const float>("weight", weight, {-1, -1});
  const PackedLinearShape shape = checked_shape(kPackOp, weight.size(1), weight.size(0), format);
  if (!rounds_floats(grouped_format(shape.format))) {
    fail(kPackOp, "format is ", format, " (", format_name(shape.format),
         "), of which a weight is packed as it is; expected one that floats are rounded to");
  }
  return shape;
}

void write_packed(const Tensor& weight, const PackedLinearShape& shape, const Tensor& out) {
  pack_linear(shape, static_cast<const float*>(weight.const_data_ptr()), weight.stride(0),
              weight.stride(1), out.mutable_data_ptr());
}

Tensor pack(const Tensor& weight, int64_t format) {
  const PackedLinearShape shape = checked_floats(weight, format);
  Tensor packed = new_packed(packed_linear_bytes(shape));
  write_packed(weight, shape, packed);
  return packed;
}

void pack_out(const Tensor& weight, int64_t format, const Tensor& out) {
  const PackedLinearShape shape = checked_floats(weight, format);
  check_packed_out(kPackOp, out, shape);
  check_apart(kPackOp, "out", out, "weight", weight);
  write_packed(weight, shape, out);
}

// Rows of whole blocks.
GgufBlock checked_blocks(const char* op, const Tensor& blocks, int64_t type) {
  check_rank(op, "blocks", blocks, 2, "[out_features, bytes of a row]");
  check_dtype(op, "blocks", blocks, ScalarType::Byte);
  if (!blocks.is_cpu() || (blocks.size(1) > 1 && blocks.stride(1) != 1)) {
    fail(op, "blocks is on ", device_name(blocks),
         ", or has strides within a row; expected bytes "
         "side by side on cpu");
  }
  const bool fits = type >= 0 && type <= std::numeric_limits<int32_t>::max();
  const GgufBlock block = fits ? gguf_block(static_cast<GgufType>(type)) : GgufBlock{};
  if (block.bytes == 0) {
    fail(op, "type is ", type, "; expected the number of a quantised type of GGUF that there is");
  }
  if (blocks.size(1) % block.bytes != 0) {
    fail(op, "blocks has rows of ", blocks.size(1), " bytes; expected a multiple of ", block.bytes);
  }
  return block;
}

PackedLinearShape checked_block_rows(const Tensor& blocks, int64_t type) {
  const GgufBlock block = checked_blocks(kPackGgufOp, blocks, type);
  const int64_t in_features = blocks.size(1) / block.bytes * grouped_format(block.format).step();
  return checked_shape(kPackGgufOp, in_features, blocks.size(0),
                       static_cast<int64_t>(block.format));
}

void write_packed_blocks(const Tensor& blocks, int64_t type, const PackedLinearShape& shape,
                         const Tensor& out) {
  pack_gguf_linear(shape, static_cast<GgufType>(type),
                   static_cast<const uint8_t*>(blocks.const_data_ptr()), blocks.stride(0),
                   out.mutable_data_ptr());
}

Tensor pack_gguf(const Tensor& blocks, int64_t type) {
  const PackedLinearShape shape = checked_block_rows(blocks, type);
  Tensor packed = new_packed(packed_linear_bytes(shape));
  write_packed_blocks(blocks, type, shape, packed);
  return packed;
}

void pack_gguf_out(const Tensor& blocks, int64_t type, const Tensor& out) {
  const PackedLinearShape shape = checked_block_rows(blocks, type);
  check_packed_out(kPackGgufOp, out, shape);
  check_apart(kPackGgufOp, "out", out, "blocks", blocks);
  write_packed_blocks(blocks, type, shape, out);
}

Tensor dequantize(const Tensor& blocks, int64_t type) {
  const GgufBlock block = checked_blocks(kDequantizeGgufOp, blocks, type);
  const int64_t row_blocks = blocks.size(1) / block.bytes;
  Tensor values =
      new_tensor(blocks, {blocks.size(0), row_blocks * grouped_format(block.format).step()},
                 ScalarType::Float);
  dequantize_gguf(static_cast<GgufType>(type), static_cast<const uint8_t*>(blocks.const_data_ptr()),
                  blocks.stride(0), blocks.size(0), row_blocks,
                  static_cast<float*>(values.mutable_data_ptr()));
  return values;
}

std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t> type_at(int64_t index) {
  if (index < 0 || index >= static_cast<int64_t>(std::size(kGgufBlocks))) return {};
  const GgufBlock& block = kGgufBlocks[index];
  const GroupedFormat format = grouped_format(block.format);
  int64_t name = 0;
  std::memcpy(&name, block.name, std::strlen(block.name));
  return {name,
          format.step(),
          block.bytes,
          static_cast<int64_t>(block.type),
          static_cast<int64_t>(block.format),
          format.group};
}

// Anything but a weight packed at some level, of the size that its header says, is refused.
Tensor repack(const Tensor& packed) {
  check_rank(kRepackOp, "packed", packed, 1, "the result of pack_linear");
  check_dtype(kRepackOp, "packed", packed, ScalarType::Byte);
  if (!packed.is_cpu() || !packed.is_contiguous()) {
    fail(kRepackOp, "packed is on ", device_name(packed),
         " or has strides; expected [bytes] on cpu");
  }
  PackedHeader header = {};
  const int64_t bytes = packed.numel();
  if (bytes >= static_cast<int64_t>(sizeof(header))) {
    std::memcpy(&header, packed.const_data_ptr(), sizeof(header));
  }
  if (header.magic != kPackedMagic) {
    fail(kRepackOp,
         "packed holds other bytes than a packed weight; expected the result of "
         "pack_linear");
  }
  const PackedLinearShape shape = checked_shape(kRepackOp, header.in_features, header.out_features,
                                                static_cast<int64_t>(header.format));
  const LinearTile tile = header.tile;
  const int64_t group = grouped_format(shape.format).step();
  const bool is_tile = tile.width > 0 && kMaxPanelWidth % tile.width == 0 && tile.values > 0 &&
                       (group > 0 ? tile.values == group : kMaxValues % tile.values == 0);
  check_steps(kRepackOp, "packed", shape);
  if (!is_tile || bytes != PackedLayout::of(shape, tile).bytes) {
    fail(kRepackOp, "packed has ", bytes, " bytes, and a header of a weight of shape [",
         shape.out_features, ", ", shape.in_features, "] in panels of ", tile.width, " by ",
         tile.values, "; expected the result of pack_linear");
  }
  Tensor result = new_packed(packed_linear_bytes(shape));
  repack_linear(shape, tile, packed.const_data_ptr(), result.mutable_data_ptr());
  return result;
}

// Returns the weight in a packed tensor; fails unless it has this shape, for this process's
// kernels.
PackedLinear checked_weight(const char* op, const Tensor& packed, const PackedLinearShape& shape,
                            const char* from) {
  check_rank(op, "packed", packed, 1, "the result of pack_linear");
  const void* const data = Arguments(op).strided<const uint8_t>("packed", packed, {-1});
  if (!packed.is_contiguous() || reinterpret_cast<uintptr_t>(data) % 64 != 0) {
    fail(op,
         "packed is not contiguous, or not aligned to 64 bytes; expected the result of "
         "pack_linear");
  }
  check_packed_weight(op, "packed", data, packed.size(0), shape, from);
  return {shape, data};
}

// The weight of pack_linear, in floats again.
Tensor unpack(const Tensor& packed, int64_t out_features, int64_t in_features, int64_t format) {
  const PackedLinearShape shape = checked_shape(kUnpackOp, in_features, out_features, format);
  const PackedLinear linear =
      checked_weight(kUnpackOp, packed, shape, ", from out_features and in_features");
  Tensor weight = new_tensor(packed, {shape.out_features, shape.in_features}, ScalarType::Float);
  float* const rows = static_cast<float*>(weight.mutable_data_ptr());
  parallel_for(shape.out_features, 1 + (1 << 14) / (shape.in_features + 1),
               [&](int64_t begin, int64_t end) {
                 const ScopedIeeeMode ieee;
                 for (int64_t output = begin; output < end; ++output) {
                   read_packed_row(linear, output, rows + output * shape.in_features);
                 }
               });
  return weight;
}

// The format with groups of this size.
LinearFormat checked_int4_format(int64_t in_features, int64_t groups, bool has_zeros) {
  for (LinearFormat format :
       {LinearFormat::kInt4Zeros32, LinearFormat::kInt4Zeros64, LinearFormat::kInt4Zeros128}) {
    const int64_t size = grouped_format(format).group;
    if (size * groups != in_features) continue;
    return has_zeros || size > 32 ? format : LinearFormat::kInt4;
  }
  fail(kPackQuantizedOp, "weight has ", in_features, " input features and scales has ", groups,
       " groups; expected groups of 32, 64 or 128");
}

void check_largest(const char* name, const Tensor& tensor, int64_t largest) {
  const uint8_t* p = static_cast<const uint8_t*>(tensor.const_data_ptr());
  uint8_t most = 0;
  for (int64_t i = 0; i < tensor.numel(); ++i) most = std::max(most, p[i]);
  if (most > largest) {
    fail(kPackQuantizedOp, name, " holds ", static_cast<int64_t>(most), "; expected at most ",
         largest);
  }
}

Tensor checked_part(const char* name, const Tensor& tensor, ScalarType dtype, int64_t rows,
                    int64_t columns) {
  Arguments(kPackQuantizedOp).strided<const void>(name, tensor, {rows, columns}, nullptr, dtype);
  return torch::stable::contiguous(tensor);
}

Tensor pack_quantized(const Tensor& weight, const Tensor& scales, const OptionalTensor& zeros) {
  check_rank(kPackQuantizedOp, "weight", weight, 2, "[out_features, in_features]");
  check_rank(kPackQuantizedOp, "scales", scales, 2, "[out_features, groups]");
  const int64_t outputs = weight.size(0), inputs = weight.size(1), groups = scales.size(1);
  const Tensor values = checked_part("weight", weight, ScalarType::Byte, outputs, inputs);
  const Tensor steps = checked_part("scales", scales, ScalarType::Half, outputs, groups);
  Tensor offsets;
  if (zeros) offsets = checked_part("zeros", *zeros, ScalarType::Byte, outputs, groups);
  const PackedLinearShape shape = {inputs, outputs,
                                   checked_int4_format(inputs, groups, zeros.has_value())};
  check_largest("weight", values, 15);
  if (zeros) check_largest("zeros", offsets, 16);
  Tensor packed = new_packed(packed_linear_bytes(shape));
  pack_quantized_linear(shape,
                        {static_cast<const uint8_t*>(values.const_data_ptr()),
                         static_cast<const Half*>(steps.const_data_ptr()),
                         zeros ? static_cast<const uint8_t*>(offsets.const_data_ptr()) : nullptr},
                        packed.mutable_data_ptr());
  return packed;
}

struct LinearArguments {
  const Tensor& x;
  const Tensor& packed;
  int64_t out_features;
  int64_t format;
  const OptionalTensor& bias;
  int64_t activation;
  const OptionalTensor& multiplier;
  const OptionalTensor& residual;
};

// `make_out()` gives the tensor to write, after all checks.
template <class MakeOut>
Tensor multiply(const LinearArguments& a, const MakeOut& make_out) {
  if (a.x.dim() == 0) fail(kLinearOp, "x has shape []; expected [..., in_features]");
  const Arguments arguments(kLinearOp);
  arguments.check_type("x", a.x, ScalarType::Float);
  OptionalTensor x = a.x, bias = a.bias, multiplier = a.multiplier, residual = a.residual;
  const TensorRows rows = rows_of(&x, false);
  const PackedLinearShape shape = checked_shape(kLinearOp, rows.size, a.out_features, a.format);
  const PackedLinear linear =
      checked_weight(kLinearOp, a.packed, shape, ", from out_features and the last size of x");
  if (a.activation < 0 || a.activation > static_cast<int64_t>(Activation::kSilu)) {
    fail(kLinearOp, "activation is ", a.activation,
         "; expected 0 (none), 1 (relu), 2 (gelu), 3 (gelu_tanh) or 4 (silu)");
  }
  LinearOutput output;
  output.activation = static_cast<Activation>(a.activation);
  if (bias) {
    arguments.strided<const float>("bias", *bias, {shape.out_features});
    rows_of(&bias, true);
    output.bias = data_of<const float>(*bias);
  }
  // Rows like the result's, from here on side by side.
  const auto matrix = [&](const char* name, OptionalTensor* tensor,
                          int64_t* row_stride) -> const float* {
    if (!*tensor) return nullptr;
    arguments.check_type(name, **tensor, ScalarType::Float);
    check_rows(kLinearOp, name, **tensor, a.x, shape.out_features);
    *row_stride = rows_of(tensor, true).stride;
    return data_of<const float>(**tensor);
  };
  output.multiplier = matrix("multiplier", &multiplier, &output.multiplier_stride);
  output.residual = matrix("residual", &residual, &output.residual_stride);

  const size_t scratch =
      linear_input_bytes(shape.format, shape.in_features, rows.count, rows.element_stride);
  void* memory = scratch == 0 ? nullptr : thread_workspace().reserve(scratch);
  if (scratch != 0 && memory == nullptr) {
    throw std::runtime_error(std::string(kLinearOp) + ": no memory for " + std::to_string(scratch) +
                             " bytes of scratch");
  }
  Tensor out = make_out(shape.out_features, &output.y_stride);
  output.y = data_of<float>(out);
  const LinearInput input =
      prepare_linear_input(shape.format, data_of<const float>(*x), rows.stride, rows.count,
                           shape.in_features, memory, rows.element_stride);
  packed_linear(linear, input, output);
  return out;
}

Tensor linear(const Tensor& x, const Tensor& packed, int64_t out_features, int64_t format,
              const OptionalTensor& bias, int64_t activation, const OptionalTensor& multiplier,
              const OptionalTensor& residual) {
  return multiply({x, packed, out_features, format, bias, activation, multiplier, residual},
                  [&](int64_t columns, int64_t* row_stride) {
                    *row_stride = columns;
                    return new_rows(x, columns, ScalarType::Float);
                  });
}

void linear_out(const Tensor& x, const Tensor& packed, int64_t out_features, int64_t format,
                const OptionalTensor& bias, int64_t activation, const OptionalTensor& multiplier,
                const OptionalTensor& residual, const Tensor& out) {
  multiply({x, packed, out_features, format, bias, activation, multiplier, residual},
           [&](int64_t columns, int64_t* row_stride) {
             Arguments(kLinearOp).check_type("out", out, ScalarType::Float);
             check_rows(kLinearOp, "out", out, x, columns);
             const std::optional<TensorRows> rows = rows_in_place(out);
             if (!rows) {
               fail(kLinearOp, "out has rows that have no stride in common; expected one");
             }
             if (rows->element_stride != 1) {
               fail(kLinearOp, "out has stride ", rows->element_stride,
                    " within a row; expected elements side by side");
             }
             if (rows->count > 1 && rows->stride < columns) {
               fail(kLinearOp, "out has rows that overlap; expected a row stride of at least ",
                    columns);
             }
             check_apart(kLinearOp, "out", out, "x", x);
             check_apart(kLinearOp, "out", out, "packed", packed);
             if (bias) check_apart(kLinearOp, "out", out, "bias", *bias);
             if (multiplier) check_apart(kLinearOp, "out", out, "multiplier", *multiplier);
             if (residual) check_apart(kLinearOp, "out", out, "residual", *residual);
             *row_stride = rows->stride;
             return out;
           });
}

// linear() for x of any dtype of floats, which the result has.
Tensor linear_rows(const Tensor& x, const Tensor& packed, int64_t out_features, int64_t format,
                   const OptionalTensor& bias) {
  if (x.dim() == 0) fail(kRowsOp, "x has shape []; expected [..., in_features]");
  float_dtype(kRowsOp, "x", x);
  const ScalarType dtype = x.scalar_type();
  const auto in_dtype = [](const Tensor& tensor, ScalarType wanted) {
    return tensor.scalar_type() == wanted ? tensor : torch::stable::to(tensor, wanted);
  };
  OptionalTensor added;
  if (bias) {
    Arguments(kRowsOp).strided<const void>("bias", *bias, {out_features}, nullptr, dtype);
    added = in_dtype(*bias, ScalarType::Float);
  }
  return in_dtype(linear(in_dtype(x, ScalarType::Float), packed, out_features, format, added, 0,
                         std::nullopt, std::nullopt),
                  dtype);
}

// Item by item what pack_linear and packed_linear do, with all of an item in scratch.
Tensor batched(const Tensor& a, const Tensor& b, int64_t format) {
  check_rank(kBatchedOp, "a", a, 3, "[batch, rows, inner]");
  check_rank(kBatchedOp, "b", b, 3, "[batch, inner, columns]");
  const int64_t count = a.size(0), rows = a.size(1), inner = a.size(2), columns = b.size(2);
  const Arguments arguments(kBatchedOp);
  const float* const a_data = arguments.strided<const float>("a", a, {-1, -1, -1});
  const float* const b_data = arguments.strided<const float>("b", b, {count, inner, -1});
  const PackedLinearShape shape = checked_shape(kBatchedOp, inner, columns, format);
  if (format > static_cast<int64_t>(LinearFormat::kBFloat16)) {
    fail(kBatchedOp, "format is ", format, "; expected 0 (float32) or 1 (bfloat16)");
  }
  Tensor out = new_tensor(a, {count, rows, columns}, ScalarType::Float);
  float* const y = static_cast<float*>(out.mutable_data_ptr());
  const int64_t element = inner > 1 ? a.stride(2) : 1;
  const size_t packed_bytes = packed_linear_bytes(shape);
  const size_t bytes = packed_bytes + linear_input_bytes(shape.format, inner, rows, element);
  const double nanoseconds = 1.0 + static_cast<double>((rows + 8) * inner * columns) / 16.0;
  const auto multiply_items = [&](int64_t begin, int64_t end, void* memory) {
    void* const input_memory = static_cast<char*>(memory) + packed_bytes;
    for (int64_t i = begin; i < end; ++i) {
      pack_linear(shape, b_data + i * b.stride(0), b.stride(2), b.stride(1), memory);
      LinearOutput output;
      output.y = y + i * rows * columns;
      output.y_stride = columns;
      packed_linear({shape, memory},
                    prepare_linear_input(shape.format, a_data + i * a.stride(0), a.stride(1), rows,
                                         inner, input_memory, element),
                    output);
    }
  };
  parallel_rows(kBatchedOp, count, nanoseconds, bytes, multiply_items);
  return out;
}

}  // namespace
}  // namespace lmdecode::linear

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("pack_linear", TORCH_BOX(&lmdecode::linear::pack));
  m.impl("repack_linear", TORCH_BOX(&lmdecode::linear::repack));
  m.impl("pack_quantized_linear", TORCH_BOX(&lmdecode::linear::pack_quantized));
  m.impl("pack_linear.out", TORCH_BOX(&lmdecode::linear::pack_out));
  m.impl("pack_gguf_linear", TORCH_BOX(&lmdecode::linear::pack_gguf));
  m.impl("pack_gguf_linear.out", TORCH_BOX(&lmdecode::linear::pack_gguf_out));
  m.impl("dequantize_gguf", TORCH_BOX(&lmdecode::linear::dequantize));
  m.impl("packed_linear", TORCH_BOX(&lmdecode::linear::linear));
  m.impl("packed_linear.out", TORCH_BOX(&lmdecode::linear::linear_out));
  m.impl("packed_linear_rows", TORCH_BOX(&lmdecode::linear::linear_rows));
  m.impl("unpack_linear", TORCH_BOX(&lmdecode::linear::unpack));
  m.impl("batched_matmul", TORCH_BOX(&lmdecode::linear::batched));
}

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CompositeExplicitAutograd, m) {
  m.impl("gguf_type", TORCH_BOX(&lmdecode::linear::type_at));
}
