// decoder_add_norm_ on CUDA tensors.
#include "bindings/decoder_step_checks_cuda.h"

namespace lmdecode::decoder {
namespace {

void add_norm(const Tensor& x, const OptionalTensor& delta, const OptionalTensor& bias,
              const OptionalTensor& gamma, const OptionalTensor& beta, double epsilon,
              bool rms_norm, bool norm_first, const Tensor& out) {
  const char* const op = "decoder_add_norm_";
  check_rank(op, "x", x, 2, "[rows, size]");
  const CudaArguments arguments(op, "x", x);
  StepAddNormParams p;
  p.dtype = float_dtype(op, "out", out);
  p.rows = x.size(0);
  p.size = x.size(1);
  const ScalarType type = out.scalar_type();
  p.x = arguments.get<float>("x", x, ScalarType::Float, {p.rows, p.size});
  p.delta = arguments.get_or_null<const void>("delta", delta, type, {p.rows, p.size});
  p.bias = arguments.get_or_null<const float>("bias", bias, ScalarType::Float, {p.size});
  p.gamma = arguments.get_or_null<const float>("gamma", gamma, ScalarType::Float, {p.size});
  p.beta = arguments.get_or_null<const float>("beta", beta, ScalarType::Float, {p.size});
  p.out = arguments.get<void>("out", out, type, {p.rows, p.size});
  p.epsilon = static_cast<float>(epsilon);
  p.rms_norm = rms_norm;
  p.norm_first = norm_first;
  const CudaGuard guard(x);
  decoder_add_norm_cuda(p, current_cuda_stream(x));
}

}  // namespace
}  // namespace lmdecode::decoder

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  m.impl("decoder_add_norm_", TORCH_BOX(&lmdecode::decoder::add_norm));
}
