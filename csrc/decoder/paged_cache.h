// Keys and values of layers in blocks that sequences share: what a block table keeps the books of.
//
// Layers with a window let go of blocks that no query to come can see; the others keep all. Layers
// of the same kind share one table: a block holds a stretch of positions for all of them. The
// blocks of a head lie side by side: blocks that follow each other, as those of a prompt do, are
// read at the speed of memory, where a few KB here and there are read at half of it.
// docs/reference/decoder.md (Decoder-only models) is the user's page.
#pragma once

#include <cstdint>

#include "attention/sliding_window_attention.h"
#include "common/half.h"
#include "kv_cache/block_table.h"
#include "kv_cache/copy_blocks.h"

namespace lmdecode::decoder {

struct PagedCache {
  kv_cache::BlockTable table;     // a row a sequence
  DType dtype = DType::kFloat32;  // of keys and values, or of queries where they are int8
  bool is_int8 = false;           // keys and values are rows of attention::Int8Cell
  unsigned char* pool = nullptr;  // [layers, 2, kv_heads, num_blocks, block_size, row_size()]
  int64_t layers = 0;
  int64_t kv_heads = 0;
  int64_t head_size = 0;
  int64_t window = 0;  // 0: all positions are kept; else those before the last `window` are let go

  int64_t element_size() const { return is_int8 ? 1 : dtype == DType::kFloat32 ? 4 : 2; }
  // In elements: of a key or value; of a block of a head; of a head; of the keys, or the values, of
  // a layer.
  int64_t row_size() const { return head_size + (is_int8 ? attention::kInt8ScaleBytes : 0); }
  int64_t block_stride() const { return table.block_size * row_size(); }
  int64_t head_stride() const { return table.num_blocks * block_stride(); }
  int64_t part_stride() const { return kv_heads * head_stride(); }
  // Of block 0.
  unsigned char* keys(int64_t layer) const {
    return pool + layer * 2 * part_stride() * element_size();
  }
  unsigned char* values(int64_t layer) const {
    return keys(layer) + part_stride() * element_size();
  }
  attention::AttentionStrides strides() const {
    return {block_stride(), head_stride(), row_size(), 1};
  }
  // The pool as copy_blocks_cpu() takes it.
  kv_cache::BlockPool block_pool() const {
    kv_cache::BlockPool blocks;
    blocks.data = pool;
    blocks.num_blocks = table.num_blocks;
    blocks.heads = layers * 2 * kv_heads;
    blocks.block_size = table.block_size;
    blocks.vector_bytes = row_size() * element_size();
    blocks.position_stride = blocks.vector_bytes;
    blocks.block_stride = block_stride() * element_size();
    blocks.head_stride = head_stride() * element_size();
    return blocks;
  }
  // The first block that a sequence of this length has to keep.
  int64_t first_kept_block(int64_t length) const {
    const int64_t first = length - window + 1;
    return window == 0 || first < 0 ? 0 : first / table.block_size;
  }
};

}  // namespace lmdecode::decoder
