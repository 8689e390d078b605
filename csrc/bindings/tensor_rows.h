// Tensors [..., size] as rows of that size, for ops that treat each row alone. A view of two
// dimensions, and one back, would take a caller longer than a small row.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "bindings/tensor_checks.h"

namespace lmdecode {

struct TensorRows {
  int64_t count = 1;
  int64_t size = 0;
  int64_t stride = 0;
  int64_t element_stride = 1;
};

// The rows of a tensor of one dimension or more; nothing where they have no stride in common.
inline std::optional<TensorRows> rows_in_place(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  TensorRows rows;
  rows.size = sizes.back();
  if (rows.size > 1) rows.element_stride = strides.back();
  rows.stride = rows.size;
  for (size_t d = sizes.size() - 1; d-- > 0;) {
    if (sizes[d] == 1) continue;
    if (sizes[d] == 0 || rows.count == 0) {
      rows.count = 0;
      continue;
    }
    if (rows.count == 1) {
      rows.stride = strides[d];
    } else if (strides[d] != rows.stride * rows.count) {
      return std::nullopt;
    }
    rows.count *= sizes[d];
  }
  return rows;
}

// Likewise, of a copy in *tensor where they have none, or, if asked for, where the elements of a
// row are not side by side.
inline TensorRows rows_of(OptionalTensor* tensor, bool side_by_side) {
  const std::optional<TensorRows> rows = rows_in_place(**tensor);
  if (rows && (!side_by_side || rows->element_stride == 1)) return *rows;
  *tensor = torch::stable::contiguous(**tensor);
  return *rows_in_place(**tensor);
}

// The shape [..., size] with the dimensions of `like` before the last.
inline std::vector<int64_t> shape_of_rows(const Tensor& like, int64_t size) {
  const auto sizes = like.sizes();
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  shape.back() = size;
  return shape;
}

inline void check_rows(const char* op, const char* name, const Tensor& tensor, const Tensor& like,
                       int64_t size) {
  const auto given = tensor.sizes(), of = like.sizes();
  if (given.size() == of.size() && given.back() == size &&
      std::equal(given.begin(), given.end() - 1, of.begin())) {
    return;
  }
  fail(op, name, " has shape ", shape_text(tensor), "; expected ",
       sizes_text(shape_of_rows(like, size)));
}

inline Tensor new_rows(const Tensor& like, int64_t size, ScalarType type) {
  const std::vector<int64_t> shape = shape_of_rows(like, size);
  return new_tensor(like, shape.data(), static_cast<int64_t>(shape.size()), type);
}

}  // namespace lmdecode
