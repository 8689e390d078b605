// Strided tensors as memory: their rows as segments of bytes, and whether elements overlap. Host
// code, no torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kv_cache/cache_rows.h"

namespace lmdecode::kv_cache {

// One dimension, the stride in bytes.
struct StridedDim {
  int64_t size;
  int64_t stride;
};

struct StridedTensor {
  unsigned char* data = nullptr;
  int64_t element_bytes = 1;
  std::vector<StridedDim> dims;

  bool is_empty() const {
    for (const StridedDim& dim : dims) {
      if (dim.size == 0) return true;
    }
    return false;
  }

  // Bytes from the first to the last, of a tensor that is not empty.
  int64_t extent() const {
    int64_t bytes = element_bytes;
    for (const StridedDim& dim : dims) bytes += (dim.size - 1) * dim.stride;
    return bytes;
  }
};

// Whether every element has a place of its own, as far as each stride reaches over all that lies
// along the smaller ones. Others are taken for overlapping: no cache is laid out like that.
inline bool elements_are_apart(const StridedTensor& tensor) {
  if (tensor.is_empty()) return true;
  std::vector<StridedDim> dims = tensor.dims;
  std::sort(dims.begin(), dims.end(),
            [](const StridedDim& a, const StridedDim& b) { return a.stride < b.stride; });
  int64_t extent = tensor.element_bytes;
  for (const StridedDim& dim : dims) {
    if (dim.size == 1) continue;
    if (dim.stride < extent) return false;
    extent += (dim.size - 1) * dim.stride;
  }
  return true;
}

namespace detail {

// sum of c_i * stride_i = target, for integers lowest_i <= c_i <= highest_i?
struct BoundedSum {
  struct Term {
    int64_t stride, lowest, highest;
    int64_t reach_low, reach_high;  // of the terms after this one
  };
  std::vector<Term> terms;  // the largest stride first
  int steps_left = 10000;

  static int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0)); }

  bool reaches(size_t at, int64_t target) {
    if (at == terms.size()) return target == 0;
    if (--steps_left < 0) return true;  // not found out: taken for reached
    const Term& t = terms[at];
    const int64_t first = std::max(t.lowest, -floor_div(t.reach_high - target, t.stride));
    const int64_t last = std::min(t.highest, floor_div(target - t.reach_low, t.stride));
    for (int64_t c = first; c <= last; ++c) {
      if (reaches(at + 1, target - c * t.stride)) return true;
    }
    return false;
  }
};

}  // namespace detail

// Whether two tensors, of elements that are apart, have a byte in common. Exact where the search is
// short, as it is for views of one buffer (keys and values side by side); else true.
inline bool tensors_share_bytes(const StridedTensor& a, const StridedTensor& b) {
  if (a.is_empty() || b.is_empty()) return false;
  const int64_t distance =
      static_cast<int64_t>(reinterpret_cast<intptr_t>(b.data) - reinterpret_cast<intptr_t>(a.data));
  if (distance >= a.extent() || -distance >= b.extent()) return false;
  using Term = detail::BoundedSum::Term;
  detail::BoundedSum sum;
  sum.terms.push_back({1, -(b.element_bytes - 1), a.element_bytes - 1, 0, 0});
  for (const StridedDim& dim : a.dims) {
    if (dim.size > 1) sum.terms.push_back({dim.stride, 0, dim.size - 1, 0, 0});
  }
  for (const StridedDim& dim : b.dims) {
    if (dim.size > 1) sum.terms.push_back({dim.stride, -(dim.size - 1), 0, 0, 0});
  }
  std::sort(sum.terms.begin(), sum.terms.end(),
            [](const Term& x, const Term& y) { return x.stride > y.stride; });
  size_t kept = 0;
  for (size_t i = 1; i < sum.terms.size(); ++i) {
    if (sum.terms[i].stride == sum.terms[kept].stride) {
      sum.terms[kept].lowest += sum.terms[i].lowest;
      sum.terms[kept].highest += sum.terms[i].highest;
    } else {
      sum.terms[++kept] = sum.terms[i];
    }
  }
  sum.terms.resize(kept + 1);
  for (size_t i = kept; i > 0; --i) {
    const Term& t = sum.terms[i];
    sum.terms[i - 1].reach_low = t.reach_low + t.lowest * t.stride;
    sum.terms[i - 1].reach_high = t.reach_high + t.highest * t.stride;
  }
  return sum.reaches(0, distance);
}

// The rows along batch_dim of a tensor whose elements are apart, with length_dim (-1: none) cut to
// `length`. False if more than kMaxCacheDims dimensions remain.
inline bool make_cache_rows(const StridedTensor& tensor, int64_t batch_dim, int64_t length_dim,
                            int64_t length, CacheRows* rows) {
  *rows = CacheRows{};
  rows->data = tensor.data;
  rows->row_stride = tensor.dims[static_cast<size_t>(batch_dim)].stride;
  std::vector<StridedDim> dims;
  dims.reserve(tensor.dims.size());
  for (size_t d = 0; d < tensor.dims.size(); ++d) {
    StridedDim dim = tensor.dims[d];
    if (static_cast<int64_t>(d) == batch_dim) continue;
    if (static_cast<int64_t>(d) == length_dim) dim.size = length;
    if (dim.size == 0) return true;
    if (dim.size > 1) dims.push_back(dim);
  }
  std::sort(dims.begin(), dims.end(),
            [](const StridedDim& a, const StridedDim& b) { return a.stride < b.stride; });
  rows->segment_bytes = tensor.element_bytes;
  std::vector<StridedDim> merged;  // the smallest stride first
  merged.reserve(dims.size());
  for (const StridedDim& dim : dims) {
    if (merged.empty() && dim.stride == rows->segment_bytes) {
      rows->segment_bytes *= dim.size;
    } else if (!merged.empty() && dim.stride == merged.back().size * merged.back().stride) {
      merged.back().size *= dim.size;
    } else {
      merged.push_back(dim);
    }
  }
  if (merged.size() > static_cast<size_t>(kMaxCacheDims)) return false;
  rows->dims = static_cast<int32_t>(merged.size());
  for (size_t d = 0; d < merged.size(); ++d) {
    rows->size[d] = merged[merged.size() - 1 - d].size;
    rows->stride[d] = merged[merged.size() - 1 - d].stride;
  }
  return true;
}

}  // namespace lmdecode::kv_cache
