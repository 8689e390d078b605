// The device that a binding is compiled for. Each source of BINDING_SOURCES (csrc/sources.cmake) is
// in _C, for CPU tensors, and in _C_cuda, where USE_CUDA is defined, for CUDA tensors:
//
//   Tensor op(const Tensor& x) {
//     ...                                  // checks, the same for both
//     const OnDevice device(x);            // before anything is allocated
//     if constexpr (kIsCuda) {
//       op_cuda(params, device.stream());
//     } else {
//       op_cpu(params);
//     }
//   }
//   LMD_OPS(m) { m.impl("op", TORCH_BOX(&lmdecode::area::op)); }
#pragma once

#include "bindings/tensor_checks.h"

#if defined(USE_CUDA)
#include "bindings/cuda_stream.h"
#define LMD_DEVICE CUDA
#else
#define LMD_DEVICE CPU
#endif

#define LMD_OPS(m) STABLE_TORCH_LIBRARY_IMPL(lmdecode, LMD_DEVICE, m)

namespace lmdecode {

#if defined(USE_CUDA)

constexpr bool kIsCuda = true;

// While it lives, the device of a tensor is the current one.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& tensor) : guard_(tensor), stream_(current_cuda_stream(tensor)) {}
  // The current one of the device.
  void* stream() const { return stream_; }

 private:
  const CudaGuard guard_;
  void* const stream_;
};

#else

constexpr bool kIsCuda = false;

class OnDevice {
 public:
  explicit OnDevice(const Tensor&) {}
  void* stream() const { return nullptr; }
};

#endif

}  // namespace lmdecode
