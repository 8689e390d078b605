// What packed_linear and the norms have in common.
#pragma once

#include "bindings/tensor_checks.h"

namespace lmdecode::linear {

inline void check_float(const char* op, const char* name, const Tensor& tensor) {
  check_dtype(op, name, tensor, ScalarType::Float);
  if (!tensor.is_cpu()) {
    fail(op, name, " is on ", device_name(tensor), "; expected a tensor on cpu");
  }
}

}  // namespace lmdecode::linear
