// reorder_cache_ on either device.
#include "kv_cache/reorder_cache.h"

#include <algorithm>
#include <vector>

#include "bindings/device.h"
#include "bindings/kv_cache_checks.h"

namespace lmdecode::kv_cache {
namespace {

constexpr const char* kOp = "reorder_cache_";

// tensors[index] in an error.
std::string nth_tensor(size_t index) { return "tensors[" + std::to_string(index) + "]"; }

int64_t checked_dim(const char* name, int64_t dim, const std::string& tensor_name,
                    const Tensor& tensor) {
  const int64_t rank = tensor.dim();
  if (dim < -rank || dim >= rank) {
    fail(kOp, name, " is ", dim, "; expected a dimension of ", tensor_name, ", which has shape ",
         shape_text(tensor));
  }
  return dim < 0 ? dim + rank : dim;
}

// The arguments of reorder_cache_, checked, as kernel parameters.
class ReorderArguments {
 public:
  ReorderArguments(const std::vector<Tensor>& tensors, const Tensor& parents, int64_t batch_dim,
                   std::optional<int64_t> length_dim, std::optional<int64_t> length) {
    if (length_dim.has_value() != length.has_value()) {
      fail(kOp, length_dim ? "length_dim" : "length", " was given without ",
           length_dim ? "length" : "length_dim", "; expected both or none");
    }
    parents_ = parent_rows(kOp, parents);
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
    Arguments(kOp, "parents", parents).check_device(name.c_str(), tensor);
    const int64_t batch = checked_dim("batch_dim", batch_dim, name, tensor);
    if (tensor.size(batch) != parents_.rows) {
      fail(kOp, "parents has shape ", shape_text(parents), "; expected [", tensor.size(batch),
           "], the rows of ", name, " along batch_dim ", batch_dim);
    }
    int64_t along = -1;
    if (length_dim) {
      along = checked_dim("length_dim", *length_dim, name, tensor);
      if (along == batch) {
        fail(kOp, "length_dim is ", *length_dim, "; expected another dimension than batch_dim, ",
             batch_dim);
      }
      if (*length < 0 || *length > tensor.size(along)) {
        fail(kOp, "length is ", *length, "; expected 0 to ", tensor.size(along), ", the size of ",
             name, " along length_dim ", *length_dim);
      }
    }
    StridedTensor strided = strided_tensor(tensor);
    if (!elements_are_apart(strided)) {
      fail(kOp, name,
           " has strides that make elements overlap; expected a tensor whose "
           "elements lie apart, not an expanded one");
    }
    strided.data = static_cast<unsigned char*>(tensor.mutable_data_ptr());
    CacheRows rows;
    if (!make_cache_rows(strided, batch, along, length.value_or(0), &rows)) {
      fail(kOp, name, " has shape ", shape_text(tensor), " and strides that leave more than ",
           kMaxCacheDims, " separate dimensions a row; expected fewer, or a contiguous tensor");
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
        fail(kOp, high + 1 == strided_.size() ? "parents" : nth_tensor(high),
             " shares memory with ", nth_tensor(low), "; expected tensors of their own memory");
      }
    }
  }

  std::vector<CacheRows> rows_;
  std::vector<StridedTensor> strided_;  // the tensors, then the parents
  ParentRows parents_;
};

void reorder_cache(const std::vector<Tensor>& tensors, const Tensor& parents, int64_t batch_dim,
                   std::optional<int64_t> length_dim, std::optional<int64_t> length) {
  const ReorderArguments arguments(tensors, parents, batch_dim, length_dim, length);
  const ReorderCacheParams params = arguments.params();
  const OnDevice device(parents);
  if constexpr (kIsCuda) {
    reorder_cache_cuda(params, device.stream());
  } else {
    check_parents(kOp, params.parents);
    reorder_cache_cpu(params);
  }
}

}  // namespace
}  // namespace lmdecode::kv_cache

LMD_OPS(m) { m.impl("reorder_cache_", TORCH_BOX(&lmdecode::kv_cache::reorder_cache)); }
