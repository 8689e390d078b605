// Launches an attention kernel: no allocation and no wait, so that a CUDA graph can capture it. For
// .cu files.
#pragma once

#include <sstream>

#include "attention/sliding_window_attention.h"
#include "common/cuda_launch.h"

namespace lmdecode::attention {

// Launches kernel(params) with `blocks` blocks and this much shared memory.
template <class Params>
void launch_attention(const char* op, void (*kernel)(Params), int64_t blocks, int threads,
                      size_t shared_bytes, const Params& params, void* stream) {
  if (blocks == 0) return;
  const CurrentDevice device(op);
  if (shared_bytes > static_cast<size_t>(device.shared_limit)) {
    std::ostringstream message;
    message << op << ": the device gives a block " << device.shared_limit
            << " bytes of shared memory; expected at least " << shared_bytes
            << " for this head_size";
    throw std::invalid_argument(message.str());
  }
  prepare_kernel(op, kernel, device);
  launch_kernel(op, kernel, {blocks, threads, shared_bytes}, stream, params);
}

// The kernels are compiled for some sizes: run(std::integral_constant) with the first that is at
// least `size`, the last one otherwise.
template <int kSize, int... kLarger, class Run>
void with_compiled_size(int64_t size, const Run& run) {
  if constexpr (sizeof...(kLarger) == 0) {
    run(std::integral_constant<int, kSize>());
  } else if (size <= kSize) {
    run(std::integral_constant<int, kSize>());
  } else {
    with_compiled_size<kLarger...>(size, run);
  }
}

// Tensor cores take 16-bit elements, sizes up to the largest that is compiled.
inline bool use_tensor_cores(const SlidingWindowAttentionParams& params) {
  return params.dtype != DType::kFloat32 && params.head_size <= 256 && params.value_size <= 256;
}

}  // namespace lmdecode::attention
