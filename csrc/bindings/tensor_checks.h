// Checks of op arguments, and tensors to plain pointers. Every failure is a std::invalid_argument,
// ValueError in Python, which names the argument, what came and what was expected. All checks run
// before anything is written.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "bindings/torch_error_check.h"
#include "common/half.h"

namespace lmdecode {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <class... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << op << ": ";
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

// Works for any tensor. Tensor::scalar_type() throws a std::runtime_error for the dtypes that
// torch's stable interface does not know, such as int4.
inline ScalarType dtype_of(const Tensor& tensor) {
  int32_t number = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &number));
  return static_cast<ScalarType>(number);
}

// As torch spells it in Python.
inline std::string dtype_name(ScalarType type) {
  // By torch's numbers; a new dtype gets the next one.
  static constexpr std::string_view kNames =
      "uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool "
      "qint8 quint8 qint32 bfloat16 quint4x2 quint2x4 bits1x8 bits2x4 bits4x2 bits8 bits16 "
      "float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz uint16 uint32 uint64 "
      "uint1 uint2 uint3 uint4 uint5 uint6 uint7 int1 int2 int3 int4 int5 int6 int7 "
      "float8_e8m0fnu float4_e2m1fn_x2 bcomplex32 ";
  std::string_view names = kNames;
  for (int number = static_cast<int>(type); number > 0 && !names.empty(); --number) {
    names.remove_prefix(names.find(' ') + 1);
  }
  if (names.empty()) return "number " + std::to_string(static_cast<int>(type));
  return std::string(names.substr(0, names.find(' ')));
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
  if (dtype_of(tensor) != type) {
    fail(op, name, " has dtype ", dtype_name(dtype_of(tensor)), "; expected ", dtype_name(type));
  }
}

template <class Sizes = std::initializer_list<int64_t>>
std::string sizes_text(const Sizes& sizes) {
  std::string text = "[";
  for (const int64_t size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

// The dtype of tensors of T.
template <class T>
constexpr ScalarType scalar_type_of() {
  using Element = std::remove_const_t<T>;
  if constexpr (std::is_same_v<Element, float>) return ScalarType::Float;
  if constexpr (std::is_same_v<Element, double>) return ScalarType::Double;
  if constexpr (std::is_same_v<Element, int64_t>) return ScalarType::Long;
  if constexpr (std::is_same_v<Element, int32_t>) return ScalarType::Int;
  if constexpr (std::is_same_v<Element, uint8_t>) return ScalarType::Byte;
  if constexpr (std::is_same_v<Element, bool>) return ScalarType::Bool;
  if constexpr (std::is_same_v<Element, Half>) return ScalarType::Half;
}

// The pointer of a tensor: of one that is only read where T is const.
template <class T>
T* data_of(const Tensor& tensor) {
  if constexpr (std::is_const_v<T>) {
    return static_cast<T*>(tensor.const_data_ptr());
  } else {
    return static_cast<T*>(tensor.mutable_data_ptr());
  }
}

// A tensor as errors name it, such as `state.scores`; put together in an error alone.
struct ArgumentName {
  const char* of;
  const char* field = "";

  ArgumentName(const char* name) : of(name) {}
  ArgumentName(const char* of, const char* field) : of(of), field(field) {}
  std::string text() const { return std::string(of) + field; }
};

// Reads the tensor arguments of one call: each a pointer, once its dtype, shape, strides and device
// match the op.
class Arguments {
 public:
  using Sizes = std::initializer_list<int64_t>;

  // All tensors are to be on the CPU.
  explicit Arguments(const char* op) : op_(op) {}
  // All tensors are to be on the device of `like`, which is asked for it once: each question to
  // torch takes some two nanoseconds of every call.
  Arguments(const char* op, const char* like_name, const Tensor& like)
      : op_(op), like_name_(like_name), like_(&like) {
    ask_device(like, &device_type_, &device_index_);
  }

  const char* op() const { return op_; }
  bool on_cpu() const { return device_type_ == 0; }

  void check_device(ArgumentName name, const Tensor& tensor) const {
    int32_t type = 0, index = 0;
    ask_device(tensor, &type, &index);
    if (type == device_type_ && (index == device_index_ || type == 0)) return;
    if (like_ == nullptr) {
      fail(op_, name.text(), " is on ", device_name(tensor), "; expected cpu");
    }
    fail(op_, name.text(), " is on ", device_name(tensor), "; expected the device of ", like_name_,
         ", ", device_name(*like_));
  }

  // A size below 0 stands for any. shape: the sizes in words.
  void check_sizes(ArgumentName name, const Tensor& tensor, Sizes sizes,
                   const char* shape = nullptr) const {
    const auto given = tensor.sizes();
    if (given.size() == sizes.size() &&
        std::equal(sizes.begin(), sizes.end(), given.begin(), [](int64_t expected, int64_t size) {
          return expected < 0 || expected == size;
        })) {
      return;
    }
    if (shape != nullptr) {
      fail(op_, name.text(), " has shape ", shape_text(tensor), "; expected ", shape, ", here ",
           sizes_text(sizes));
    }
    const bool has_any =
        std::any_of(sizes.begin(), sizes.end(), [](int64_t size) { return size < 0; });
    fail(op_, name.text(), " has shape ", shape_text(tensor), "; expected ", sizes_text(sizes),
         has_any ? ", where -1 is any size" : "");
  }

  void check_contiguous(ArgumentName name, const Tensor& tensor) const {
    if (tensor.is_contiguous()) return;
    fail(op_, name.text(), " has strides; expected a contiguous tensor");
  }

  // Any shape, and any strides.
  void check_type(ArgumentName name, const Tensor& tensor, ScalarType type) const {
    if (dtype_of(tensor) != type) check_dtype(op_, name.text().c_str(), tensor, type);
    check_device(name, tensor);
  }

  // Any strides.
  template <class T>
  T* strided(ArgumentName name, const Tensor& tensor, Sizes sizes, const char* shape = nullptr,
             ScalarType type = scalar_type_of<T>()) const {
    if (dtype_of(tensor) != type) check_dtype(op_, name.text().c_str(), tensor, type);
    check_sizes(name, tensor, sizes, shape);
    check_device(name, tensor);
    return data_of<T>(tensor);
  }

  template <class T>
  T* contiguous(ArgumentName name, const Tensor& tensor, Sizes sizes, const char* shape = nullptr,
                ScalarType type = scalar_type_of<T>()) const {
    T* const data = strided<T>(name, tensor, sizes, shape, type);
    check_contiguous(name, tensor);
    return data;
  }

  // Null if absent.
  template <class T>
  T* contiguous(ArgumentName name, const OptionalTensor& tensor, Sizes sizes,
                const char* shape = nullptr, ScalarType type = scalar_type_of<T>()) const {
    return tensor ? contiguous<T>(name, *tensor, sizes, shape, type) : nullptr;
  }

 private:
  static void ask_device(const Tensor& tensor, int32_t* type, int32_t* index) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), type));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), index));
  }

  const char* op_;
  const char* like_name_ = "";
  const Tensor* like_ = nullptr;
  int32_t device_type_ = 0, device_index_ = 0;  // 0: the CPU
};

// The memory from a tensor's first to its last element; empty where it has none.
struct MemorySpan {
  const char *begin = nullptr, *end = nullptr;

  explicit MemorySpan(const Tensor& t) {
    if (t.numel() == 0) return;
    int64_t elements = t.numel();
    if (!t.is_contiguous()) {
      elements = 1;
      for (int64_t i = 0; i < t.dim(); ++i) elements += (t.size(i) - 1) * t.stride(i);
    }
    begin = static_cast<const char*>(t.const_data_ptr());
    end = begin + elements * static_cast<int64_t>(t.element_size());
  }

  bool meets(const MemorySpan& other) const { return begin < other.end && other.begin < end; }
};

// Throws where two tensors may have bytes in common: as far as the spans of their memory tell.
inline void check_apart(const char* op, const char* name, const Tensor& tensor,
                        const char* other_name, const Tensor& other) {
  if (MemorySpan(tensor).meets(MemorySpan(other))) {
    fail(op, name, " shares memory with ", other_name, "; expected a tensor of its own");
  }
}

// A contiguous, uninitialised tensor on the device of `like`. By the C shim: a call through the
// dispatcher takes longer than a small row.
inline Tensor new_tensor(const Tensor& like, const int64_t* shape, int64_t rank, ScalarType type) {
  constexpr int64_t kUsualRank = 8;
  int64_t few[kUsualRank];
  std::vector<int64_t> many(static_cast<size_t>(rank > kUsualRank ? rank : 0));
  int64_t* const strides = rank > kUsualRank ? many.data() : few;
  for (int64_t i = rank - 1, stride = 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= shape[i] > 0 ? shape[i] : 1;
  }
  int32_t device_type = 0, device_index = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      rank, shape, strides, static_cast<int32_t>(type), device_type, device_index, &handle));
  return Tensor(handle);
}

inline Tensor new_tensor(const Tensor& like, std::initializer_list<int64_t> shape,
                         ScalarType type) {
  return new_tensor(like, shape.begin(), static_cast<int64_t>(shape.size()), type);
}

// An integer that is known when the op has run.
inline Tensor new_integer(const Tensor& like, int64_t value) {
  Tensor made = new_tensor(like, {}, ScalarType::Long);
  *static_cast<int64_t*>(made.mutable_data_ptr()) = value;
  return made;
}

inline DType float_dtype(const char* op, const char* name, const Tensor& tensor) {
  switch (dtype_of(tensor)) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    default:
      fail(op, name, " has dtype ", dtype_name(dtype_of(tensor)),
           "; expected float32, float16 or bfloat16");
  }
}

}  // namespace lmdecode
