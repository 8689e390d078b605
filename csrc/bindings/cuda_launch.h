// Where the KV cache ops launch.
#pragma once

#include "bindings/cuda_stream.h"
#include "bindings/tensor_checks.h"

namespace lmdecode::kv_cache {

// The current stream of the device that a tensor is on, which is the current one meanwhile.
class LaunchStream {
 public:
  LaunchStream(const char* op, const char* name, const Tensor& tensor)
      : guard_(on_cuda(op, name, tensor)), stream_(current_cuda_stream(tensor)) {}
  void* get() const { return stream_; }

 private:
  static const Tensor& on_cuda(const char* op, const char* name, const Tensor& tensor) {
    if (!tensor.is_cuda()) {
      fail(op, name, " is on ", device_name(tensor), "; expected the device of the cache");
    }
    return tensor;
  }

  const CudaGuard guard_;
  void* const stream_;
};

}  // namespace lmdecode::kv_cache
