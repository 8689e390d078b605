// decoder_activate_ on CUDA tensors.
#include "bindings/decoder_step_checks_cuda.h"

namespace lmdecode::decoder {
namespace {

void activate(const Tensor& up, const OptionalTensor& gate, int64_t activation) {
  const char* const op = "decoder_activate_";
  check_rank(op, "up", up, 2, "[rows, size]");
  if (activation < 1 || activation > 4) {
    fail(op, "activation is ", activation, "; expected 1 to 4");
  }
  const CudaArguments arguments(op, "up", up);
  StepActivateParams p;
  p.dtype = float_dtype(op, "up", up);
  const ScalarType type = up.scalar_type();
  p.count = up.numel();
  p.up = arguments.get<void>("up", up, type, {up.size(0), up.size(1)});
  p.gate = arguments.get_or_null<const void>("gate", gate, type, {up.size(0), up.size(1)});
  p.activation = static_cast<StepActivation>(activation);
  const CudaGuard guard(up);
  decoder_activate_cuda(p, current_cuda_stream(up));
}

}  // namespace
}  // namespace lmdecode::decoder

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  m.impl("decoder_activate_", TORCH_BOX(&lmdecode::decoder::activate));
}
