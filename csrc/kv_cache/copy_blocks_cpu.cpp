// Heads of copies to threads.
#include <cstring>

#include "common/parallel.h"
#include "kv_cache/copy_blocks.h"
#include "kv_cache/kv_cache_tuning.h"

namespace lmdecode::kv_cache {
namespace {

void copy_head(const BlockPool& pool, const BlockCopy& copy, int64_t head) {
  const unsigned char* const from = pool.at(copy.source, head);
  unsigned char* const to = pool.at(copy.target, head);
  const size_t bytes = static_cast<size_t>(pool.vector_bytes);
  if (pool.position_stride == pool.vector_bytes) {
    std::memcpy(to, from, bytes * static_cast<size_t>(copy.positions));
    return;
  }
  for (int64_t p = 0; p < copy.positions; ++p) {
    std::memcpy(to + p * pool.position_stride, from + p * pool.position_stride, bytes);
  }
}

}  // namespace

void copy_blocks_cpu(const CopyBlocksParams& params) {
  for (int64_t i = 0; i < params.pool_count; ++i) {
    const BlockPool& pool = params.pools[i];
    if (pool.heads == 0 || pool.vector_bytes == 0) continue;
    const int64_t grain = 1 + tuning::kMinTaskBytes / (1 + pool.block_size * pool.vector_bytes);
    parallel_for(params.copy_count * pool.heads, grain, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        copy_head(pool, params.copies[item / pool.heads], item % pool.heads);
      }
    });
  }
}

}  // namespace lmdecode::kv_cache
