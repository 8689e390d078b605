// What the launches of the KV cache ops have in common.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace lmdecode {

inline void check_cuda(const char* op, cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // the next call must not find it again
  throw std::runtime_error(std::string(op) + ": " + what + ": " + cudaGetErrorString(error));
}

// The device that is current, as far as launches are laid out by it.
struct CurrentDevice {
  int shared_limit = 0;  // bytes of dynamic shared memory of a block
  int multiprocessors = 0;

  explicit CurrentDevice(const char* op) {
    int device = 0;
    check_cuda(op, cudaGetDevice(&device), "cudaGetDevice");
    check_cuda(
        op, cudaDeviceGetAttribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        "cudaDeviceGetAttribute");
    check_cuda(op, cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
               "cudaDeviceGetAttribute");
  }
};

}  // namespace lmdecode
