// Arguments of update_beam_indirection_ to kernel parameters: shared by the CPU and the CUDA
// library.
#pragma once

#include <limits>

#include "bindings/kv_cache.h"
#include "kv_cache/update_beam_indirection.h"

namespace lmdecode::kv_cache {

constexpr const char* kIndirectionOp = "update_beam_indirection_";

inline void check_apart_from(const Tensor& indirection, const char* name, const Tensor& other) {
  if (tensors_share_bytes(strided_input(indirection), strided_input(other))) {
    fail(kIndirectionOp, name, " shares memory with indirection; expected a tensor of its own");
  }
}

inline BeamIndirectionParams beam_indirection_params(const Tensor& indirection,
                                                     const Tensor& parents, int64_t length,
                                                     const std::optional<Tensor>& length_rows) {
  constexpr const char* kOp = kIndirectionOp;
  BeamIndirectionParams params;
  params.parents = parent_rows(kOp, parents);
  check_rank(kOp, "indirection", indirection, 2, "[rows, capacity]");
  check_dtype(kOp, "indirection", indirection, ScalarType::Int);
  check_same_device(kOp, "indirection", indirection, "parents", parents);
  const int64_t rows = indirection.size(0);
  check_shape(kOp, "parents", parents, rows);
  params.capacity = indirection.size(1);
  params.row_stride = indirection.stride(0);
  if (params.capacity > std::numeric_limits<int32_t>::max()) {
    fail(kOp, "indirection has shape ", shape_text(indirection),
         "; expected fewer than 2^31 "
         "positions");
  }
  const bool in_order = params.capacity <= 1 || indirection.stride(1) == 1;
  if (!in_order || (rows > 1 && params.row_stride < params.capacity)) {
    fail(kOp, "indirection has strides [", params.row_stride, ", ", indirection.stride(1),
         "]; expected positions side by side, in rows of their own");
  }
  if (length_rows) {
    check_shape(kOp, "length", *length_rows, rows);
    check_integers(kOp, "length", *length_rows);
    check_same_device(kOp, "length", *length_rows, "indirection", indirection);
    check_apart_from(indirection, "length", *length_rows);
    params.lengths.rows = integer_rows(*length_rows);
  } else if (length < 0 || length > params.capacity) {
    fail(kOp, "length is ", length, "; expected 0 to ", params.capacity,
         ", the positions of indirection");
  }
  params.lengths.all = length;
  check_apart_from(indirection, "parents", parents);
  params.table = static_cast<int32_t*>(indirection.mutable_data_ptr());
  return params;
}

// Of lengths on the CPU: elsewhere nobody looks.
inline void check_lengths(const BeamIndirectionParams& params) {
  if (params.lengths.rows.data == nullptr) return;
  for (int64_t row = 0; row < params.parents.rows; ++row) {
    const int64_t length = params.lengths.at(row);
    if (length < 0 || length > params.capacity) {
      fail(kIndirectionOp, "length[", row, "] is ", length, "; expected 0 to ", params.capacity,
           ", the positions of indirection");
    }
  }
}

}  // namespace lmdecode::kv_cache
