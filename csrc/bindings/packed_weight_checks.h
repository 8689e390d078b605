// The check of a packed weight that a caller hands in.
#pragma once

#include <cstring>

#include "bindings/tensor_checks.h"
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
    case LinearFormat::kInt4:
      return "int4";
    case LinearFormat::kInt4Zeros32:
      return "int4 with zeros of groups of 32";
    case LinearFormat::kInt4Zeros64:
      return "int4 with zeros of groups of 64";
    case LinearFormat::kInt4Zeros128:
      return "int4 with zeros of groups of 128";
  }
  return "unknown";
}

// Throws unless these bytes, aligned to 64, are a weight of this shape for the kernels of this
// process. why: what the shape comes from.
inline void check_packed_weight(const char* op, const std::string& name, const void* data,
                                int64_t bytes, const PackedLinearShape& shape, const char* why) {
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
  if (header.format != shape.format) {
    fail(op, name, " has format ", format_name(header.format), "; expected ",
         format_name(shape.format));
  }
  if (header.in_features != shape.in_features || header.out_features != shape.out_features) {
    fail(op, name, " is a weight of shape [", header.out_features, ", ", header.in_features,
         "]; expected [", shape.out_features, ", ", shape.in_features, "]", why);
  }
  const LinearTile tile = linear_kernels_of(shape.format).tile(shape.format);
  if (header.tile.width != tile.width || header.tile.values != tile.values ||
      bytes != static_cast<int64_t>(packed_linear_bytes(shape))) {
    fail(op, name, " was made at another CPU capability than the one in use, ",
         cpu_capability_name(cpu_capability()), "; expected a weight packed in this process");
  }
}

}  // namespace lmdecode::linear
