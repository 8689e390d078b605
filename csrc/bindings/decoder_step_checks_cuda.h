// The arguments of the ops of a decoder's step on CUDA tensors.
#pragma once

#include <optional>

#include "bindings/cuda_stream.h"
#include "bindings/tensor_checks.h"
#include "decoder/decoder_step_cuda.h"

namespace lmdecode::decoder {

// Of the caches of a memory, which are read 16 bytes at a time.
inline void check_source(const char* op, int64_t source) {
  if (source % kAttentionBlock != 0) {
    fail(op, "keys has ", source, " positions; expected a multiple of ", kAttentionBlock);
  }
}

using OptionalTensor = std::optional<Tensor>;

// The arguments of one call, all of them contiguous and on the device of the first.
class CudaArguments {
 public:
  CudaArguments(const char* op, const char* name, const Tensor& first)
      : op_(op), first_name_(name), first_(first) {
    if (!first.is_cuda()) fail(op, name, " is on ", device_name(first), "; expected cuda");
  }

  // Its pointer; -1 in the shape: any size.
  template <class T>
  T* get(const char* name, const Tensor& tensor, ScalarType type,
         std::initializer_list<int64_t> shape) const {
    check_same_device(op_, name, tensor, first_name_, first_);
    check_dtype(op_, name, tensor, type);
    bool fits = tensor.dim() == static_cast<int64_t>(shape.size()) && tensor.is_contiguous();
    int64_t dim = 0;
    for (const int64_t size : shape) {
      fits = fits && (size < 0 || tensor.size(dim) == size);
      ++dim;
    }
    if (!fits) {
      std::ostringstream expected;
      const char* separator = "";
      for (const int64_t size : shape) {
        expected << separator;
        size < 0 ? expected << "any" : expected << size;
        separator = ", ";
      }
      fail(op_, name, " has shape ", shape_text(tensor), "; expected [", expected.str(),
           "], contiguous");
    }
    return static_cast<T*>(const_cast<void*>(tensor.const_data_ptr()));
  }

  // The same, of a cache, which is read 16 bytes at a time.
  template <class T>
  T* get_cache(const char* name, const Tensor& tensor, ScalarType type,
               std::initializer_list<int64_t> shape) const {
    T* const pointer = get<T>(name, tensor, type, shape);
    if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) {
      fail(op_, name, " begins ", reinterpret_cast<uintptr_t>(pointer) % 16,
           " bytes behind a multiple of 16; expected a multiple of 16");
    }
    return pointer;
  }

  template <class T>
  T* get_or_null(const char* name, const OptionalTensor& tensor, ScalarType type,
                 std::initializer_list<int64_t> shape) const {
    return tensor ? get<T>(name, *tensor, type, shape) : nullptr;
  }

 private:
  const char* op_;
  const char* first_name_;
  const Tensor& first_;
};

}  // namespace lmdecode::decoder
