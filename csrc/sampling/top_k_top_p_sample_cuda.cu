// Launches top_k_top_p_sample: no allocation and no wait, so that a CUDA graph can capture it.
#include <stdexcept>
#include <string>

#include "sampling/sampling_launch_plan.h"
#include "sampling/top_k_top_p_sample.h"
#include "sampling/top_k_top_p_sample_kernel.cuh"

namespace lmdecode {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // the next call must not find it again
  throw std::runtime_error(std::string("top_k_top_p_sample: ") + what + ": " +
                           cudaGetErrorString(error));
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

template <class T>
void launch(const TopKTopPSampleParams& params, cudaStream_t stream) {
  const auto kernel = &sampling_cuda::top_k_top_p_sample_kernel<T>;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  cudaFuncAttributes code;
  check(cudaFuncGetAttributes(&code, kernel), "cudaFuncGetAttributes");
  SamplingDevice limits;
  limits.multiprocessors = attribute(cudaDevAttrMultiProcessorCount, device);
  limits.shared_bytes_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  limits.shared_bytes_per_multiprocessor =
      attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  // Clusters are a matter of the code that was compiled as much as of the device: PTX for sm_80
  // knows none, wherever it runs.
  if (code.ptxVersion >= 90 && attribute(cudaDevAttrClusterLaunch, device) != 0) {
    limits.max_cluster_size = sampling_cuda_tuning::kMaxClusterSize;
  }
  const SamplingLaunchPlan plan = plan_sampling_launch(params.batch, params.vocab, sizeof(T),
                                                       sizeof(sampling_cuda::RowStorage), limits);
  // The attribute belongs to the kernel, not to the launch: the device's limit, whatever this plan
  // takes, so that another thread's launch is not held to less than it needs.
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(limits.shared_bytes_per_block)),
        "cudaFuncSetAttribute");

  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(plan.clusters * plan.cluster_size));
  config.blockDim = dim3(static_cast<unsigned>(plan.threads));
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(plan.cluster_size);
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  if (plan.cluster_size > 1) {
    config.attrs = &cluster;
    config.numAttrs = 1;
  }
  check(cudaLaunchKernelEx(&config, kernel, params, plan), "launch");
  check(cudaGetLastError(), "launch");
}

}  // namespace

void top_k_top_p_sample_cuda(const TopKTopPSampleParams& params, void* stream) {
  if (params.batch == 0) return;
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  switch (params.dtype) {
    case DType::kFloat32:
      return launch<float>(params, cuda_stream);
    case DType::kFloat16:
      return launch<Half>(params, cuda_stream);
    case DType::kBFloat16:
      return launch<BFloat16>(params, cuda_stream);
  }
}

}  // namespace lmdecode
