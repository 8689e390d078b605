// Copies between a tensor's memory and planes.
#pragma once

#include <cstdint>

#include "store/slot_layout.h"

namespace lmdecode::store {

// Copies [heads, tokens, elements] of `element_size` (1, 2, 4 or 8) bytes; the two do not overlap.
// Where both have elements or both have tokens side by side, in runs; else element by element.
// streamed: past the caches where rows allow it, for targets that are not read soon.
void copy_plane(char* target, const PlaneStrides& target_strides, const char* source,
                const PlaneStrides& source_strides, int64_t heads, int64_t tokens, int64_t elements,
                int64_t element_size, bool streamed = false);

// copy_plane() of a whole plane without gaps between heads and rows, and its crc32c; in one pass
// where the machine and the rows allow it. staging: memory for the plane, where the source must be
// read once because it may change meanwhile; null: it may be read twice.
uint32_t copy_plane_crc32c(char* target, const PlaneStrides& target_strides, const char* source,
                           const PlaneStrides& source_strides, int64_t heads, int64_t tokens,
                           int64_t elements, int64_t element_size, bool streamed,
                           char* staging = nullptr);

// Streamed copies of this thread are complete for all others.
void finish_streamed_copies();

}  // namespace lmdecode::store
