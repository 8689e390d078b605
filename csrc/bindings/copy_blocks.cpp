// copy_blocks_ on either device.
#include "kv_cache/copy_blocks.h"

#include <vector>

#include "bindings/device.h"
#include "bindings/kv_cache_checks.h"

namespace lmdecode::kv_cache {
namespace {

constexpr const char* kOp = "copy_blocks_";

// pools[index] in an error.
std::string nth_pool(size_t index) { return "pools[" + std::to_string(index) + "]"; }

// The arguments of copy_blocks_, checked, as kernel parameters.
class CopyBlocksArguments {
 public:
  CopyBlocksArguments(const std::vector<Tensor>& pools, const Tensor& copies)
      : copies_(copies), arguments_(kOp, "copies", copies) {
    if (copies.dim() != 2 || copies.size(1) != 3) {
      fail(kOp, "copies has shape ", shape_text(copies),
           "; expected [copies, 3]: source, target, positions");
    }
    check_dtype(kOp, "copies", copies, ScalarType::Int);
    if (!copies.is_contiguous()) fail(kOp, "copies is not contiguous; expected it to be");
    std::vector<StridedTensor> strided;
    for (size_t i = 0; i < pools.size(); ++i) {
      strided.push_back(strided_tensor(pools[i]));
      strided.back().data = static_cast<unsigned char*>(pools[i].mutable_data_ptr());
      add(nth_pool(i), pools[i], strided.back());
      for (size_t j = 0; j < i; ++j) {
        if (!tensors_share_bytes(strided[j], strided[i])) continue;
        fail(kOp, nth_pool(i), " shares memory with ", nth_pool(j),
             "; expected pools of their own memory");
      }
      if (tensors_share_bytes(strided[i], strided_input(copies))) {
        fail(kOp, "copies shares memory with ", nth_pool(i), "; expected a tensor of its own");
      }
    }
  }

  CopyBlocksParams params() const {
    return {pools_.data(), static_cast<int64_t>(pools_.size()),
            static_cast<const BlockCopy*>(copies_.const_data_ptr()), copies_.size(0)};
  }

 private:
  void add(const std::string& name, const Tensor& tensor, const StridedTensor& strided) {
    arguments_.check_device(name.c_str(), tensor);
    check_rank(kOp, name.c_str(), tensor, 4, "[num_blocks, heads, block_size, dim]");
    if (!elements_are_apart(strided) || (tensor.size(3) > 1 && tensor.stride(3) != 1)) {
      fail(kOp, name,
           " has strides that are not those of a pool; expected elements that lie apart,"
           " and contiguous ones in the last dimension");
    }
    BlockPool pool;
    pool.data = strided.data;
    pool.num_blocks = tensor.size(0);
    pool.heads = tensor.size(1);
    pool.block_size = tensor.size(2);
    pool.vector_bytes = tensor.size(3) * strided.element_bytes;
    pool.block_stride = strided.dims[0].stride;
    pool.head_stride = strided.dims[1].stride;
    pool.position_stride = strided.dims[2].stride;
    pools_.push_back(pool);
  }

  const Tensor& copies_;
  const Arguments arguments_;
  std::vector<BlockPool> pools_;
};

void check_copies(const CopyBlocksParams& params) {
  for (int64_t p = 0; p < params.pool_count; ++p) {
    const BlockPool& pool = params.pools[p];
    std::vector<uint8_t> is_source(static_cast<size_t>(pool.num_blocks));
    std::vector<uint8_t> is_target(is_source.size());
    for (int64_t i = 0; i < params.copy_count; ++i) {
      const BlockCopy copy = params.copies[i];
      if (!pool.has_block(copy.source) || !pool.has_block(copy.target) || copy.positions < 0 ||
          copy.positions > pool.block_size) {
        fail(kOp, "copies[", i, "] is (", copy.source, ", ", copy.target, ", ", copy.positions,
             "); expected blocks 0 to ", pool.num_blocks - 1, " and 0 to ", pool.block_size,
             " positions, those of ", nth_pool(static_cast<size_t>(p)));
      }
      is_source[static_cast<size_t>(copy.source)] = 1;
      uint8_t& target = is_target[static_cast<size_t>(copy.target)];
      if (target) {
        fail(kOp, "copies[", i, "] has the target ", copy.target,
             " of another one; expected each once");
      }
      target = 1;
    }
    for (size_t block = 0; block < is_source.size(); ++block) {
      if (is_source[block] && is_target[block]) {
        fail(kOp, "copies have block ", block,
             " as a source and as a target; expected no copy to read what another one writes");
      }
    }
  }
}

void copy_blocks(const std::vector<Tensor>& pools, const Tensor& copies) {
  const CopyBlocksArguments arguments(pools, copies);
  const CopyBlocksParams params = arguments.params();
  const OnDevice device(copies);
  if constexpr (kIsCuda) {
    copy_blocks_cuda(params, device.stream());
  } else {
    check_copies(params);
    copy_blocks_cpu(params);
  }
}

}  // namespace
}  // namespace lmdecode::kv_cache

LMD_OPS(m) { m.impl("copy_blocks_", TORCH_BOX(&lmdecode::kv_cache::copy_blocks)); }
