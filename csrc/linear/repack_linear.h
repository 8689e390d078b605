// repack_linear: reorders a packed weight from the layout of one level's kernels to another's.
#pragma once

#include "linear/packed_layout.h"

namespace lmdecode::linear {

// from: packed_linear_bytes(shape) bytes that were packed with `tile`; to: as many, for the kernels
// of this process's CPU capability. The weight is the same, bit for bit: nothing is rounded again.
void repack_linear(const PackedLinearShape& shape, LinearTile tile, const void* from, void* to);

}  // namespace lmdecode::linear
