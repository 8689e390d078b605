// The check of a packed weight that a caller hands in.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>

#include "bindings/tensor_checks.h"
#include "linear/gguf_blocks.h"
#include "linear/packed_layout.h"
#include "linear/packed_linear_kernels.h"

namespace lmdecode::linear {

inline const char* format_name(LinearFormat format) {
  switch (format) {
    case LinearFormat::kFloat32:
      return "float32";
    case LinearFormat::kBFloat16:
      return "bfloat16";
    case LinearFormat::kInt8:
      return "int8";
    case LinearFormat::kInt8Rotated:
      return "int8, rotated";
    case LinearFormat::kInt4:
      return "int4 in groups of 32";
    case LinearFormat::kInt4Zeros32:
      return "int4 with zeros of groups of 32";
    case LinearFormat::kInt4Zeros64:
      return "int4 with zeros of groups of 64";
    case LinearFormat::kInt4Zeros128:
      return "int4 with zeros of groups of 128";
    case LinearFormat::kInt4Minimums32:
      return "int4 with minimums of groups of 32";
    case LinearFormat::kInt4Minimums64:
      return "int4 with minimums of groups of 64";
    case LinearFormat::kInt4Minimums128:
      return "int4 with minimums of groups of 128";
    case LinearFormat::kInt8Groups:
      return "int8 in groups of 32";
    case LinearFormat::kInt8Minimums:
      return "int8 with minimums of groups of 32";
    case LinearFormat::kInt4RotatedMinimums32:
      return "int4, rotated, with minimums of groups of 32";
    case LinearFormat::kInt4RotatedMinimums64:
      return "int4, rotated, with minimums of groups of 64";
    case LinearFormat::kInt4RotatedMinimums128:
      return "int4, rotated, with minimums of groups of 128";
    default:  // of one type of GGUF files
      for (const GgufBlock& block : kGgufBlocks) {
        if (block.format == format) return block.name;
      }
  }
  return "unknown";
}

// The header of these bytes, aligned to 64; throws where they are no packed weight.
inline PackedHeader packed_header(const char* op, const std::string& name, const void* data,
                                  int64_t bytes) {
  PackedHeader header = {};
  if (bytes < static_cast<int64_t>(sizeof(header))) {
    fail(op, name, " has ", bytes, " bytes; expected the result of pack_linear");
  }
  std::memcpy(&header, data, sizeof(header));
  if (header.magic != kPackedMagic) {
    fail(op, name,
         " holds other bytes than a packed weight; expected the result of "
         "pack_linear");
  }
  return header;
}

// Throws where rows do not consist of super-blocks, which are packed as they are.
inline void check_steps(const char* op, const std::string& name, const PackedLinearShape& shape) {
  const GroupedFormat format = grouped_format(shape.format);
  if (!format.is_super() || shape.in_features % format.step() == 0) return;
  fail(op, name, " has ", shape.in_features, " input features; expected a multiple of ",
       format.step(), " with ", format_name(shape.format));
}

// Throws unless these bytes, aligned to 64, are a weight of this shape for the kernels of this
// process. why: the origin of the shape.
inline void check_packed_weight(const char* op, const std::string& name, const void* data,
                                int64_t bytes, const PackedLinearShape& shape, const char* why) {
  const PackedHeader header = packed_header(op, name, data, bytes);
  if (header.format != shape.format) {
    fail(op, name, " has format ", format_name(header.format), "; expected ",
         format_name(shape.format));
  }
  if (header.in_features != shape.in_features || header.out_features != shape.out_features) {
    fail(op, name, " is a weight of shape [", header.out_features, ", ", header.in_features,
         "]; expected [", shape.out_features, ", ", shape.in_features, "]", why);
  }
  check_steps(op, name, shape);
  const LinearTile tile = linear_kernels_of(shape.format).tile(shape.format);
  if (header.tile.width != tile.width || header.tile.values != tile.values ||
      bytes != static_cast<int64_t>(packed_linear_bytes(shape))) {
    fail(op, name, " was made at another CPU capability than the one in use, ",
         cpu_capability_name(cpu_capability()), "; expected a weight packed in this process");
  }
}

// A weight of these sizes at the beginning of bytes, aligned to 64: of the format given, or in up
// to `most` parts of any, concatenated. Returns their number; *used: their bytes.
inline int64_t check_packed_parts(const char* op, const std::string& name, const void* data,
                                  int64_t bytes, int64_t in_features, int64_t out_features,
                                  std::optional<LinearFormat> format, const char* why,
                                  PackedLinear* parts, int64_t most, int64_t* used) {
  *used = 0;
  int64_t count = 0;
  for (int64_t left = out_features; left > 0 || count == 0; ++count) {
    const char* const part = static_cast<const char*>(data) + *used;
    PackedLinearShape shape = {in_features, left, format.value_or(LinearFormat::kFloat32)};
    if (!format.has_value()) {
      const PackedHeader header = packed_header(op, name, part, bytes - *used);
      const int64_t number = static_cast<int64_t>(header.format);
      if (number < 0 || number > kMaxLinearFormat) {
        fail(op, name, " has format ", number, "; expected 0 to ", kMaxLinearFormat);
      }
      shape.format = header.format;
      if (count + 1 < most && header.out_features > 0 && header.out_features < left) {
        shape.out_features = header.out_features;
      }
    }
    // A weight takes two bits at least: larger shapes fail before a count that may overflow.
    const bool fits = in_features <= 4 * bytes / std::max<int64_t>(shape.out_features, 1);
    const int64_t size = fits ? static_cast<int64_t>(packed_linear_bytes(shape)) : bytes + 1;
    if (size > bytes - *used) {
      fail(op, name, " has shape [", bytes, "]; expected [", *used + size, "] at least", why);
    }
    check_packed_weight(op, name, part, size, shape, why);
    parts[count] = {shape, part};
    *used += size;
    left -= shape.out_features;
  }
  return count;
}

}  // namespace lmdecode::linear
