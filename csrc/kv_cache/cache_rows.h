// The rows of a cache tensor as bytes: addresses independent of layout and dtype. Kernels see a
// tensor like this; strided_tensor.h makes it.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace lmdecode::kv_cache {

// Dimensions of a row that do not merge into longer ones; [B, H, S, D] has at most 3.
constexpr int kMaxCacheDims = 6;

// Row r begins at data + r * row_stride. It is made of segments of contiguous bytes, which lie
// along `dims` dimensions, the largest stride first. All strides are in bytes.
struct CacheRows {
  unsigned char* data = nullptr;
  int64_t row_stride = 0;
  int64_t segment_bytes = 0;  // 0: rows are empty
  int64_t size[kMaxCacheDims] = {};
  int64_t stride[kMaxCacheDims] = {};
  int32_t dims = 0;

  LMD_HOST_DEVICE int64_t segments() const {
    int64_t count = 1;
    for (int d = 0; d < dims; ++d) count *= size[d];
    return count;
  }
};

}  // namespace lmdecode::kv_cache
