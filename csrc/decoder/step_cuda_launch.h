// Launches of the kernels of a decoder's step. For .cu files.
#pragma once

#include <string>

#include "common/cuda_launch.h"
#include "decoder/step_launch.h"

namespace lmdecode::decoder {

// The kernel for a dtype, of Kernel<T>'s three.
template <class Kernel>
Kernel kernel_of(DType dtype, Kernel float32, Kernel float16, Kernel bfloat16) {
  return dtype == DType::kFloat32 ? float32 : dtype == DType::kFloat16 ? float16 : bfloat16;
}

template <class Params>
void launch_step(const char* op, void (*kernel)(Params), const Params& params, int64_t blocks,
                 int64_t shared_bytes, void* stream, int cluster_size = 1) {
  launch_kernel(
      op, kernel,
      {blocks, step_cuda_tuning::kThreads, static_cast<size_t>(shared_bytes), cluster_size}, stream,
      params);
}

// Launches kernel(params) for `items` rows and heads, whose blocks share the positions of a cache;
// shared_bytes(params, parts): shared memory of a block.
template <class Params>
void launch_step_attention(const char* op, void (*kernel)(Params), const Params& params,
                           int64_t items, int64_t positions,
                           int64_t (*shared_bytes)(const Params&, int), void* stream) {
  if (items == 0) return;
  const CurrentDevice device(op);
  const int parts = parts_of_cache(positions, prepare_kernel(op, kernel, device));
  const int64_t bytes = shared_bytes(params, parts);
  if (bytes > device.shared_limit) {
    throw std::invalid_argument(
        std::string(op) + ": the cache has more positions than fit: " + std::to_string(bytes) +
        " bytes of shared memory; expected "
        "at most " +
        std::to_string(device.shared_limit));
  }
  launch_step(op, kernel, params, items * parts, bytes, stream, parts);
}

}  // namespace lmdecode::decoder
