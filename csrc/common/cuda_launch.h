// Launching kernels. For .cu files.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace lmdecode {

// Blocks that a grid can have along x.
constexpr int64_t kMaxGrid = (int64_t{1} << 31) - 1;

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

// Limits of a device that launch plans depend on.
struct DeviceLimits {
  int shared_limit = 0;  // bytes of dynamic shared memory of a block
  int multiprocessors = 0;
  int shared_of_multiprocessor = 0;  // bytes
  bool has_clusters = false;
};

// Blocks of a thread block cluster that every device with clusters runs.
constexpr int kPortableClusterSize = 8;

// A cache of find(key); one thread at a time calls find().
template <class Key, class Value>
class FoundOnce {
 public:
  template <class Find>
  Value get(const Key& key, const Find& find) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = known_.find(key);
    return known != known_.end() ? known->second : known_.emplace(key, find()).first->second;
  }

 private:
  std::mutex mutex_;
  std::map<Key, Value> known_;
};

// The device that is current. The runtime is asked for its limits once, not in each launch.
struct CurrentDevice : DeviceLimits {
  int index = 0;

  explicit CurrentDevice(const char* op) {
    check_cuda(op, cudaGetDevice(&index), "cudaGetDevice");
    static FoundOnce<int, DeviceLimits> all;
    static_cast<DeviceLimits&>(*this) = all.get(index, [&] {
      const auto found = [&](cudaDeviceAttr which) { return device_attribute(op, which, index); };
      return DeviceLimits{
          found(cudaDevAttrMaxSharedMemoryPerBlockOptin), found(cudaDevAttrMultiProcessorCount),
          found(cudaDevAttrMaxSharedMemoryPerMultiprocessor), found(cudaDevAttrClusterLaunch) != 0};
    });
  }
};

// Allows launches of a kernel all the shared memory that a block of the device can have. The limit
// belongs to the kernel, not to a launch, so it is raised once to the maximum. Returns the largest
// cluster size, which depends on the compiled code as well as on the device: PTX for sm_80 has no
// clusters.
template <class Kernel>
int prepare_kernel(const char* op, Kernel* kernel, const CurrentDevice& device) {
  static FoundOnce<std::pair<const void*, int>, int> all;
  const void* const code = reinterpret_cast<const void*>(kernel);
  return all.get({code, device.index}, [&] {
    cudaFuncAttributes found;
    check_cuda(op, cudaFuncGetAttributes(&found, code), "cudaFuncGetAttributes");
    check_cuda(op,
               cudaFuncSetAttribute(code, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    device.shared_limit),
               "cudaFuncSetAttribute");
    return found.ptxVersion >= 90 && device.has_clusters ? kPortableClusterSize : 1;
  });
}

// How the blocks of a launch are laid out.
struct LaunchShape {
  int64_t blocks = 0;  // along x; a grid of as many as there can be goes round
  int threads = 0;     // of a block
  size_t shared_bytes = 0;
  int cluster_size = 1;  // blocks of a thread block cluster, that many divide `blocks`; 1: none
};

// kernel(arguments...): no allocation and no wait, so that a CUDA graph can capture it.
template <class... Parameters>
void launch_kernel(const char* op, void (*kernel)(Parameters...), const LaunchShape& shape,
                   void* stream, const std::type_identity_t<Parameters>&... arguments) {
  const int64_t most = kMaxGrid / shape.cluster_size * shape.cluster_size;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks < most ? shape.blocks : most));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(shape.cluster_size);
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  if (shape.cluster_size > 1) {
    config.attrs = &cluster;
    config.numAttrs = 1;
  }
  check_cuda(op, cudaLaunchKernelEx(&config, kernel, arguments...), "launch");
}

}  // namespace lmdecode
