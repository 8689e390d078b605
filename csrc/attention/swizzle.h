// Where elements of a tile of 16-bit elements lie in shared memory.
#pragma once

#include "common/host_device.h"

namespace lmdecode::attention::cuda_kernels {

constexpr int kChunk = 8;  // elements of 16 bytes, which stay side by side

// The place of an element, column % 8 == 0, of a tile of rows of kSize: the same chunk of eight
// rows that follow each other lies in eight different groups of banks.
template <int kSize>
LMD_HOST_DEVICE int swizzled(int row, int column) {
  static_assert(kSize % (8 * kChunk) == 0);
  return row * kSize + (column / kChunk ^ row % 8) * kChunk;
}

}  // namespace lmdecode::attention::cuda_kernels
