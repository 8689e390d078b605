// update_beam_indirection_ on either device.
#include "kv_cache/update_beam_indirection.h"

#include <limits>

#include "bindings/device.h"
#include "bindings/kv_cache_checks.h"

namespace lmdecode::kv_cache {
namespace {

constexpr const char* kOp = "update_beam_indirection_";

BeamIndirectionParams beam_indirection_params(const Tensor& indirection, const Tensor& parents,
                                              int64_t length,
                                              const std::optional<Tensor>& length_rows) {
  BeamIndirectionParams params;
  params.parents = parent_rows(kOp, parents);
  const Arguments arguments(kOp, "indirection", indirection);
  check_rank(kOp, "indirection", indirection, 2, "[rows, capacity]");
  check_dtype(kOp, "indirection", indirection, ScalarType::Int);
  arguments.check_device("parents", parents);
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
    arguments.check_device("length", *length_rows);
    check_shares_no_bytes(kOp, "length", *length_rows, "indirection", indirection);
    params.lengths.rows = integer_rows(*length_rows);
  } else if (length < 0 || length > params.capacity) {
    fail(kOp, "length is ", length, "; expected 0 to ", params.capacity,
         ", the positions of indirection");
  }
  params.lengths.all = length;
  check_shares_no_bytes(kOp, "parents", parents, "indirection", indirection);
  params.table = static_cast<int32_t*>(indirection.mutable_data_ptr());
  return params;
}

// For lengths on the CPU only.
void check_lengths(const BeamIndirectionParams& params) {
  if (params.lengths.rows.data == nullptr) return;
  for (int64_t row = 0; row < params.parents.rows; ++row) {
    const int64_t length = params.lengths.at(row);
    if (length < 0 || length > params.capacity) {
      fail(kOp, "length[", row, "] is ", length, "; expected 0 to ", params.capacity,
           ", the positions of indirection");
    }
  }
}

void update_beam_indirection(const Tensor& indirection, const Tensor& parents, int64_t length,
                             const std::optional<Tensor>& length_rows) {
  const BeamIndirectionParams params =
      beam_indirection_params(indirection, parents, length, length_rows);
  const OnDevice device(indirection);
  if constexpr (kIsCuda) {
    update_beam_indirection_cuda(params, device.stream());
  } else {
    check_parents(kOp, params.parents);
    check_lengths(params);
    update_beam_indirection_cpu(params);
  }
}

}  // namespace
}  // namespace lmdecode::kv_cache

LMD_OPS(m) {
  m.impl("update_beam_indirection_", TORCH_BOX(&lmdecode::kv_cache::update_beam_indirection));
}
