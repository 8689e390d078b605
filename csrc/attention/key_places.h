// Where the keys and values of a sequence lie in a cache: in a row of their own, in blocks of a
// pool that sequences share, or each in the row that a beam index names. Shared by the CPU and the
// CUDA kernels. docs/reference/kv_cache.md has the layouts of both tables.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace lmdecode::attention {

// A key: row (or block) of the cache, and the token within.
struct KeyPlace {
  int64_t row;
  int64_t token;
};

// At most one of the tables is given. Of either, only entries of keys that some query of the
// sequence sees are read: others may hold anything. Those that are read name a row below `rows`:
// checked on the CPU, not on a device.
struct KeyPlaces {
  const int32_t* block_table = nullptr;  // [sequences, blocks of a sequence], or null
  const int32_t* indirection = nullptr;  // [sequences, keys], or null
  int64_t sequence_stride = 0;           // of either
  int64_t block_size = 0;                // keys of a block
  int64_t rows = 0;                      // that k and v have: blocks of a pool, rows of a cache

  LMD_HOST_DEVICE bool has_table() const {
    return block_table != nullptr || indirection != nullptr;
  }

  // Of key `key` of a sequence; with neither table, of a cache with a row a sequence.
  LMD_HOST_DEVICE KeyPlace place(int64_t sequence, int64_t key) const {
    if (block_table != nullptr) {
      return {block_table[sequence * sequence_stride + key / block_size], key % block_size};
    }
    if (indirection != nullptr) return {indirection[sequence * sequence_stride + key], key};
    return {sequence, key};
  }
};

}  // namespace lmdecode::attention
