// layer_norm and rms_norm, on CPU tensors alone.
#include "linear/norms.h"

#include <cmath>

#include "bindings/tensor_rows.h"

namespace lmdecode::linear {
namespace {

Tensor norm(const char* op, const Tensor& x, const OptionalTensor& weight,
            const OptionalTensor& bias, double eps, void (*run)(const NormParams&)) {
  if (x.dim() == 0) fail(op, "x has shape []; expected [..., size]");
  const Arguments arguments(op);
  arguments.check_type("x", x, ScalarType::Float);
  if (!(eps >= 0.0) || std::isinf(eps)) {
    fail(op, "eps is ", eps, "; expected a finite number of at least 0");
  }
  OptionalTensor input = x, gamma = weight, beta = bias;  // or copies, side by side
  const TensorRows rows = rows_of(&input, true);
  NormParams p;
  p.rows = rows.count;
  p.size = rows.size;
  p.eps = static_cast<float>(eps);
  p.x = data_of<const float>(*input);
  p.x_stride = rows.stride;
  const auto columns = [&](const char* name, OptionalTensor* tensor) -> const float* {
    if (!*tensor) return nullptr;
    arguments.strided<const float>(name, **tensor, {p.size});
    rows_of(tensor, true);
    return data_of<const float>(**tensor);
  };
  p.gamma = columns("weight", &gamma);
  p.beta = columns("bias", &beta);
  Tensor out = new_rows(x, p.size, ScalarType::Float);
  p.y = data_of<float>(out);
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
