// copy_blocks_ on CUDA tensors.
#include "bindings/copy_blocks.h"
#include "bindings/cuda_launch.h"

namespace lmdecode::kv_cache {
namespace {

void copy_blocks(const std::vector<Tensor>& pools, const Tensor& copies) {
  const CopyBlocksArguments arguments(pools, copies);
  const LaunchStream stream(kCopyBlocksOp, "copies", copies);
  copy_blocks_cuda(arguments.params(), stream.get());
}

}  // namespace
}  // namespace lmdecode::kv_cache

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  m.impl("copy_blocks_", TORCH_BOX(&lmdecode::kv_cache::copy_blocks));
}
