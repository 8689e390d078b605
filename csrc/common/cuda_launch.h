// What the launches of kernels have in common. For .cu files.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace lmdecode {

// Blocks that a grid can have along x.
constexpr int64_t kMaxGrid = (int64_t{1} << 31) - 1;

inline unsigned grid_of(int64_t blocks) {
  return static_cast<unsigned>(blocks < kMaxGrid ? blocks : kMaxGrid);
}

inline void check_cuda(const char* op, cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // the next call must not find it again
  throw std::runtime_error(std::string(op) + ": " + what + ": " + cudaGetErrorString(error));
}

inline int device_attribute(const char* op, cudaDeviceAttr which, int device) {
  int value = 0;
  check_cuda(op, cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

// The device that is current, as far as launches are laid out by it.
struct CurrentDevice {
  int index = 0;
  int shared_limit = 0;  // bytes of dynamic shared memory of a block
  int multiprocessors = 0;

  explicit CurrentDevice(const char* op) {
    check_cuda(op, cudaGetDevice(&index), "cudaGetDevice");
    shared_limit = device_attribute(op, cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
    multiprocessors = device_attribute(op, cudaDevAttrMultiProcessorCount, index);
  }
};

}  // namespace lmdecode
