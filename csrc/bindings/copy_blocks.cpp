// copy_blocks_ on CPU tensors.
#include "bindings/copy_blocks.h"

namespace lmdecode::kv_cache {
namespace {

void check_copies(const CopyBlocksParams& params) {
  for (int64_t p = 0; p < params.pool_count; ++p) {
    const BlockPool& pool = params.pools[p];
    std::vector<uint8_t> is_source(static_cast<size_t>(pool.num_blocks));
    std::vector<uint8_t> is_target(is_source.size());
    for (int64_t i = 0; i < params.copy_count; ++i) {
      const BlockCopy copy = params.copies[i];
      if (!pool.has_block(copy.source) || !pool.has_block(copy.target) || copy.positions < 0 ||
          copy.positions > pool.block_size) {
        fail(kCopyBlocksOp, "copies[", i, "] is (", copy.source, ", ", copy.target, ", ",
             copy.positions, "); expected blocks 0 to ", pool.num_blocks - 1, " and 0 to ",
             pool.block_size, " positions, those of ", nth_pool(static_cast<size_t>(p)));
      }
      is_source[static_cast<size_t>(copy.source)] = 1;
      uint8_t& target = is_target[static_cast<size_t>(copy.target)];
      if (target) {
        fail(kCopyBlocksOp, "copies[", i, "] has the target ", copy.target,
             " of another one; expected each once");
      }
      target = 1;
    }
    for (size_t block = 0; block < is_source.size(); ++block) {
      if (is_source[block] && is_target[block]) {
        fail(kCopyBlocksOp, "copies have block ", block,
             " as a source and as a target; expected no copy to read what another one writes");
      }
    }
  }
}

void copy_blocks(const std::vector<Tensor>& pools, const Tensor& copies) {
  const CopyBlocksArguments arguments(pools, copies);
  const CopyBlocksParams params = arguments.params();
  check_copies(params);
  copy_blocks_cpu(params);
}

}  // namespace
}  // namespace lmdecode::kv_cache

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("copy_blocks_", TORCH_BOX(&lmdecode::kv_cache::copy_blocks));
}
