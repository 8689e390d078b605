// Arguments of copy_blocks_ to kernel parameters: shared by the CPU and the CUDA library.
#pragma once

#include <vector>

#include "bindings/kv_cache.h"
#include "kv_cache/copy_blocks.h"

namespace lmdecode::kv_cache {

constexpr const char* kCopyBlocksOp = "copy_blocks_";

// pools[index] in an error.
inline std::string nth_pool(size_t index) { return "pools[" + std::to_string(index) + "]"; }

// The arguments of copy_blocks_, checked, as kernel parameters.
class CopyBlocksArguments {
 public:
  CopyBlocksArguments(const std::vector<Tensor>& pools, const Tensor& copies) : copies_(copies) {
    constexpr const char* kOp = kCopyBlocksOp;
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
    constexpr const char* kOp = kCopyBlocksOp;
    check_same_device(kOp, name.c_str(), tensor, "copies", copies_);
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
  std::vector<BlockPool> pools_;
};

}  // namespace lmdecode::kv_cache
