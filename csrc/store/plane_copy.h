// Copies between a tensor's memory and planes.
#pragma once

#include <cstdint>

#include "store/slot_layout.h"

namespace lmdecode::store {

// Copies [heads, tokens, elements] of `element_size` (1, 2, 4 or 8) bytes; the two do not overlap.
// Where both have elements or both have tokens side by side, in runs; else element by element.
void copy_plane(char* target, const PlaneStrides& target_strides, const char* source,
                const PlaneStrides& source_strides, int64_t heads, int64_t tokens, int64_t elements,
                int64_t element_size);

}  // namespace lmdecode::store
