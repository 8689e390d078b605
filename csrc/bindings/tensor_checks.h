// Checks of op arguments, and tensors to plain pointers. Every failure is a std::invalid_argument,
// ValueError in Python, which names the argument, what came and what was expected. All checks run
// before anything is written.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "bindings/torch_error_check.h"
#include "common/half.h"

namespace lmdecode {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << op << ": ";
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

inline const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Bool:
      return "bool";
    default:
      return "another dtype";
  }
}

inline std::string shape_text(const Tensor& tensor) {
  std::ostringstream text;
  text << '[';
  for (int64_t i = 0; i < tensor.dim(); ++i) text << (i ? ", " : "") << tensor.size(i);
  text << ']';
  return text.str();
}

inline const char* device_name(const Tensor& tensor) {
  return tensor.is_cpu() ? "cpu" : tensor.is_cuda() ? "cuda" : "another device";
}

inline void check_rank(const char* op, const char* name, const Tensor& tensor, int64_t rank,
                       const char* shape) {
  if (tensor.dim() != rank) {
    fail(op, name, " has shape ", shape_text(tensor), "; expected ", rank, " dimensions, ", shape);
  }
}

inline void check_same_device(const char* op, const char* name, const Tensor& tensor,
                              const char* other_name, const Tensor& other) {
  if (tensor.is_cpu() != other.is_cpu() || tensor.is_cuda() != other.is_cuda() ||
      (tensor.is_cuda() && tensor.get_device_index() != other.get_device_index())) {
    fail(op, name, " is on ", device_name(tensor), "; expected the device of ", other_name, ", ",
         device_name(other));
  }
}

// [batch] or [batch, columns]
inline void check_shape(const char* op, const char* name, const Tensor& tensor, int64_t batch,
                        int64_t columns = -1) {
  const bool ok = columns < 0
                      ? tensor.dim() == 1 && tensor.size(0) == batch
                      : tensor.dim() == 2 && tensor.size(0) == batch && tensor.size(1) == columns;
  if (ok) return;
  if (columns < 0) fail(op, name, " has shape ", shape_text(tensor), "; expected [", batch, "]");
  fail(op, name, " has shape ", shape_text(tensor), "; expected [", batch, ", ", columns, "]");
}

inline void check_dtype(const char* op, const char* name, const Tensor& tensor, ScalarType type) {
  if (tensor.scalar_type() != type) {
    fail(op, name, " has dtype ", dtype_name(tensor.scalar_type()), "; expected ",
         dtype_name(type));
  }
}

// A contiguous, uninitialised tensor on the device of `like`. By the C shim: a call through the
// dispatcher takes longer than a small row.
inline Tensor new_tensor(const Tensor& like, std::initializer_list<int64_t> shape,
                         ScalarType type) {
  int64_t strides[4] = {1, 1, 1, 1};
  const int64_t rank = static_cast<int64_t>(shape.size());
  for (int64_t i = rank - 2; i >= 0; --i) {
    const int64_t inner = shape.begin()[i + 1];
    strides[i] = strides[i + 1] * (inner > 0 ? inner : 1);
  }
  int32_t device_type = 0, device_index = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(rank, shape.begin(), strides,
                                                         static_cast<int32_t>(type), device_type,
                                                         device_index, &handle));
  return Tensor(handle);
}

inline DType float_dtype(const char* op, const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    default:
      fail(op, name, " has dtype ", dtype_name(tensor.scalar_type()),
           "; expected float32, float16 or bfloat16");
  }
}

}  // namespace lmdecode
