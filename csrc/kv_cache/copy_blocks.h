// copy_blocks_: the copies that a block table asks for, in the pools of all layers.
// docs/reference/kv_cache.md is the user's page.
#pragma once

#include <cstdint>

#include "kv_cache/block_table.h"

namespace lmdecode::kv_cache {

// [num_blocks, heads, block_size, dim], dim contiguous. Strides in bytes.
struct BlockPool {
  unsigned char* data = nullptr;
  int64_t num_blocks = 0, heads = 0, block_size = 0, vector_bytes = 0;
  int64_t block_stride = 0, head_stride = 0, position_stride = 0;

  LMD_HOST_DEVICE bool has_block(int32_t block) const { return block >= 0 && block < num_blocks; }
  LMD_HOST_DEVICE unsigned char* at(int64_t block, int64_t head) const {
    return data + block * block_stride + head * head_stride;
  }
};

struct CopyBlocksParams {
  const BlockPool* pools = nullptr;  // [pool_count]; no two share a byte
  int64_t pool_count = 0;
  const BlockCopy* copies = nullptr;  // [copy_count]; no target is a source or another's target
  int64_t copy_count = 0;
};

// Runs on the calling thread and torch's worker threads. Copies are in range: the binding has
// looked.
void copy_blocks_cpu(const CopyBlocksParams& params);

// stream is a cudaStream_t; launches only. Copies out of range are left out.
void copy_blocks_cuda(const CopyBlocksParams& params, void* stream);

}  // namespace lmdecode::kv_cache
