// Arguments of the KV cache ops to kernel parameters: shared by the CPU and the CUDA library.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "bindings/tensor_checks.h"
#include "kv_cache/reorder_cache.h"
#include "kv_cache/strided_tensor.h"

namespace lmdecode::kv_cache {

constexpr const char* kReorderOp = "reorder_cache_";

inline StridedTensor strided_tensor(const Tensor& tensor) {
  StridedTensor strided;
  strided.element_bytes = static_cast<int64_t>(tensor.element_size());
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  for (size_t d = 0; d < sizes.size(); ++d) {
    strided.dims.push_back({sizes[d], strides[d] * strided.element_bytes});
  }
  return strided;
}

// With its address, of a tensor that is only read.
inline StridedTensor strided_input(const Tensor& tensor) {
  StridedTensor strided = strided_tensor(tensor);
  strided.data = static_cast<unsigned char*>(const_cast<void*>(tensor.const_data_ptr()));
  return strided;
}

inline void check_integers(const char* op, const char* name, const Tensor& tensor) {
  const ScalarType type = tensor.scalar_type();
  if (type != ScalarType::Long && type != ScalarType::Int) {
    fail(op, name, " has dtype ", dtype_name(type), "; expected int64 or int32");
  }
}

// [rows] int64 or int32
inline IntegerRows integer_rows(const Tensor& tensor) {
  IntegerRows rows;
  rows.data = tensor.const_data_ptr();
  rows.stride = tensor.stride(0);
  rows.is_int32 = tensor.scalar_type() == ScalarType::Int;
  return rows;
}

inline ParentRows parent_rows(const char* op, const Tensor& parents) {
  check_rank(op, "parents", parents, 1, "[batch]");
  check_integers(op, "parents", parents);
  if (parents.size(0) > std::numeric_limits<int32_t>::max() / 2) {
    fail(op, "parents has shape ", shape_text(parents), "; expected fewer than 2^30 rows");
  }
  return {integer_rows(parents), static_cast<int32_t>(parents.size(0))};
}

// Of parents on the CPU: elsewhere nobody looks.
inline void check_parents(const char* op, const ParentRows& parents) {
  for (int64_t row = 0; row < parents.rows; ++row) {
    const int64_t parent = parents.at(row);
    if (!parents.contains(parent)) {
      fail(op, "parents[", row, "] is ", parent, "; expected 0 to ", parents.rows - 1);
    }
  }
}

// tensors[index] in an error.
inline std::string nth_tensor(size_t index) { return "tensors[" + std::to_string(index) + "]"; }

inline int64_t checked_dim(const char* name, int64_t dim, const std::string& tensor_name,
                           const Tensor& tensor) {
  const int64_t rank = tensor.dim();
  if (dim < -rank || dim >= rank) {
    fail(kReorderOp, name, " is ", dim, "; expected a dimension of ", tensor_name,
         ", which has shape ", shape_text(tensor));
  }
  return dim < 0 ? dim + rank : dim;
}

// The arguments of reorder_cache_, checked, as kernel parameters.
class ReorderArguments {
 public:
  ReorderArguments(const std::vector<Tensor>& tensors, const Tensor& parents, int64_t batch_dim,
                   std::optional<int64_t> length_dim, std::optional<int64_t> length) {
    if (length_dim.has_value() != length.has_value()) {
      fail(kReorderOp, length_dim ? "length_dim" : "length", " was given without ",
           length_dim ? "length" : "length_dim", "; expected both or none");
    }
    parents_ = parent_rows(kReorderOp, parents);
    rows_.reserve(tensors.size());
    strided_.reserve(tensors.size() + 1);
    for (size_t i = 0; i < tensors.size(); ++i) {
      add(nth_tensor(i), tensors[i], parents, batch_dim, length_dim, length);
    }
    strided_.push_back(strided_input(parents));
    check_nothing_is_shared();
  }

  ReorderCacheParams params() const {
    return {rows_.data(), static_cast<int64_t>(rows_.size()), parents_};
  }

 private:
  void add(const std::string& name, const Tensor& tensor, const Tensor& parents, int64_t batch_dim,
           std::optional<int64_t> length_dim, std::optional<int64_t> length) {
    check_same_device(kReorderOp, name.c_str(), tensor, "parents", parents);
    const int64_t batch = checked_dim("batch_dim", batch_dim, name, tensor);
    if (tensor.size(batch) != parents_.rows) {
      fail(kReorderOp, "parents has shape ", shape_text(parents), "; expected [",
           tensor.size(batch), "], the rows of ", name, " along batch_dim ", batch_dim);
    }
    int64_t along = -1;
    if (length_dim) {
      along = checked_dim("length_dim", *length_dim, name, tensor);
      if (along == batch) {
        fail(kReorderOp, "length_dim is ", *length_dim,
             "; expected another dimension than batch_dim, ", batch_dim);
      }
      if (*length < 0 || *length > tensor.size(along)) {
        fail(kReorderOp, "length is ", *length, "; expected 0 to ", tensor.size(along),
             ", the size of ", name, " along length_dim ", *length_dim);
      }
    }
    StridedTensor strided = strided_tensor(tensor);
    if (!elements_are_apart(strided)) {
      fail(kReorderOp, name,
           " has strides that make elements overlap; expected a tensor whose "
           "elements lie apart, not an expanded one");
    }
    strided.data = static_cast<unsigned char*>(tensor.mutable_data_ptr());
    CacheRows rows;
    if (!make_cache_rows(strided, batch, along, length.value_or(0), &rows)) {
      fail(kReorderOp, name, " has shape ", shape_text(tensor),
           " and strides that leave more than ", kMaxCacheDims,
           " separate dimensions a row; expected fewer, or a contiguous tensor");
    }
    rows_.push_back(rows);
    strided_.push_back(std::move(strided));
  }

  // Sorted by address, a tensor can only meet those that begin before it ends.
  void check_nothing_is_shared() const {
    std::vector<size_t> order;
    for (size_t i = 0; i < strided_.size(); ++i) {
      if (!strided_[i].is_empty()) order.push_back(i);
    }
    std::sort(order.begin(), order.end(),
              [&](size_t a, size_t b) { return strided_[a].data < strided_[b].data; });
    for (size_t i = 0; i < order.size(); ++i) {
      const StridedTensor& first = strided_[order[i]];
      const unsigned char* const end = first.data + first.extent();
      for (size_t j = i + 1; j < order.size() && strided_[order[j]].data < end; ++j) {
        if (!tensors_share_bytes(first, strided_[order[j]])) continue;
        const size_t low = std::min(order[i], order[j]), high = std::max(order[i], order[j]);
        fail(kReorderOp, high + 1 == strided_.size() ? "parents" : nth_tensor(high),
             " shares memory with ", nth_tensor(low), "; expected tensors of their own memory");
      }
    }
  }

  std::vector<CacheRows> rows_;
  std::vector<StridedTensor> strided_;  // the tensors, then the parents
  ParentRows parents_;
};

}  // namespace lmdecode::kv_cache
