// The ops of a step of a Sampler and of its verification of drafts on CUDA tensors.
#include "bindings/cuda_stream.h"
#include "bindings/sampler.h"

namespace lmdecode::sampling {
namespace {

// Memory of torch's: a CUDA graph captures it.
Tensor new_scratch(const SamplerStepParams& params, const Tensor& state) {
  return new_tensor(state, {sampler_cuda_scratch_bytes(params)}, ScalarType::Byte);
}

void run_step(const SamplerStepParams& params, const Tensor& state) {
  Tensor scratch = new_scratch(params, state);
  sampler_step_cuda(params, scratch.mutable_data_ptr(), current_cuda_stream(state));
}

void run_verify(const SamplerVerifyParams& params, const Tensor& state) {
  Tensor scratch = new_scratch(params.step, state);
  sampler_verify_cuda(params, scratch.mutable_data_ptr(), current_cuda_stream(state));
}

constexpr auto kStep = &step<run_step, CudaGuard>;
constexpr auto kVerify = &verify<run_verify, CudaGuard>;

}  // namespace
}  // namespace lmdecode::sampling

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  m.impl("sampler_step_", TORCH_BOX(lmdecode::sampling::kStep));
  m.impl("sampler_verify_", TORCH_BOX(lmdecode::sampling::kVerify));
}
