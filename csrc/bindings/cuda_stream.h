// Where a CUDA binding launches: every one begins with the device guard and the current stream.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

namespace lmdecode {

// Makes the device of a CUDA tensor the current one.
struct CudaGuard {
  explicit CudaGuard(const torch::stable::Tensor& tensor) : guard(tensor.get_device_index()) {}
  const torch::stable::accelerator::DeviceGuard guard;
};

// The current stream of the device of a CUDA tensor.
inline void* current_cuda_stream(const torch::stable::Tensor& tensor) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return stream;
}

}  // namespace lmdecode
