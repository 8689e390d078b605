// Device guard and current stream: every CUDA binding begins with them.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <stdexcept>
#include <string>

#include "bindings/torch_error_check.h"

namespace lmdecode {

// Makes the device of a CUDA tensor the current one.
struct CudaGuard {
  explicit CudaGuard(const torch::stable::Tensor& tensor) : guard(tensor.get_device_index()) {}
  const torch::stable::accelerator::DeviceGuard guard;
};

using CurrentCudaStreamFunction = decltype(&aoti_torch_get_current_cuda_stream);

// libtorch_cuda's function that returns the current stream. It cannot be linked: a torch without
// CUDA does not have it, and a weak symbol stays null also with one, because torch loads
// libtorch_cuda for itself alone (RTLD_LOCAL). std::runtime_error where it is missing.
inline CurrentCudaStreamFunction find_current_cuda_stream() {
  void* const library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) {
    throw std::runtime_error(
        "lmdecode: a CUDA tensor came, but torch has not loaded libtorch_cuda.so");
  }
  const char* const name = "aoti_torch_get_current_cuda_stream";
  void* const function = dlsym(library, name);
  if (function == nullptr) {
    throw std::runtime_error(std::string("lmdecode: torch's libtorch_cuda.so has no ") + name +
                             "; torch 2.11 or later is needed");
  }
  return reinterpret_cast<CurrentCudaStreamFunction>(function);
}

// The current stream of a CUDA device.
inline void* current_cuda_stream(int32_t device_index) {
  static const CurrentCudaStreamFunction get_stream = find_current_cuda_stream();
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(get_stream(device_index, &stream));
  return stream;
}

// The current stream of the device of a CUDA tensor.
inline void* current_cuda_stream(const torch::stable::Tensor& tensor) {
  return current_cuda_stream(tensor.get_device_index());
}

}  // namespace lmdecode
