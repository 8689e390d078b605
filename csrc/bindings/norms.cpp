// layer_norm and rms_norm, on CPU tensors alone.
#include "linear/norms.h"

#include <cmath>

#include "bindings/tensor_checks.h"

namespace lmdecode::linear {
namespace {

Tensor norm(const char* op, const Tensor& x, const OptionalTensor& weight,
            const OptionalTensor& bias, double eps, void (*run)(const NormParams&)) {
  check_rank(op, "x", x, 2, "[rows, size]");
  const Arguments arguments(op);
  arguments.strided<const float>("x", x, {-1, -1});
  if (!(eps >= 0.0) || std::isinf(eps)) {
    fail(op, "eps is ", eps, "; expected a finite number of at least 0");
  }
  NormParams p;
  p.rows = x.size(0);
  p.size = x.size(1);
  p.eps = static_cast<float>(eps);
  const auto columns = [&](const char* name, const OptionalTensor& tensor, Tensor* copy) {
    if (!tensor) return static_cast<const float*>(nullptr);
    arguments.strided<const float>(name, *tensor, {p.size});
    *copy = torch::stable::contiguous(*tensor);
    return static_cast<const float*>(copy->const_data_ptr());
  };
  Tensor gamma, beta;
  p.gamma = columns("weight", weight, &gamma);
  p.beta = columns("bias", bias, &beta);
  const Tensor rows = p.size <= 1 || x.stride(1) == 1 ? x : torch::stable::contiguous(x);
  p.x = static_cast<const float*>(rows.const_data_ptr());
  p.x_stride = rows.stride(0);
  Tensor out = new_tensor(x, {p.rows, p.size}, ScalarType::Float);
  p.y = static_cast<float*>(out.mutable_data_ptr());
  p.y_stride = p.size;
  run(p);
  return out;
}

Tensor layer_norm_op(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                     double eps) {
  return norm("layer_norm", x, weight, bias, eps, &layer_norm);
}

Tensor rms_norm_op(const Tensor& x, const OptionalTensor& weight, double eps) {
  return norm("rms_norm", x, weight, std::nullopt, eps, &rms_norm);
}

}  // namespace
}  // namespace lmdecode::linear

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("layer_norm", TORCH_BOX(&lmdecode::linear::layer_norm_op));
  m.impl("rms_norm", TORCH_BOX(&lmdecode::linear::rms_norm_op));
}
