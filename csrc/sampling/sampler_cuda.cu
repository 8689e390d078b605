// Launches the kernels of a Sampler: no allocation and no wait, so that a CUDA graph can capture
// them.
#include "common/cuda_launch.h"
#include "sampling/sampler_kernel.cuh"

namespace lmdecode::sampling {
namespace {

int64_t blocks_of(const SamplerStepParams& params) {
  return params.batch < cuda_tuning::kMaxSamplerBlocks ? params.batch
                                                       : cuda_tuning::kMaxSamplerBlocks;
}

template <class Params>
void launch(const char* op, void (*kernel)(Params, char*), const Params& params,
            const SamplerStepParams& step, void* scratch, void* stream) {
  int threads = cuda_tuning::kMinThreads;
  while (threads < cuda_tuning::kMaxThreads &&
         threads * cuda_tuning::kLogitsPerThread < step.vocab) {
    threads *= 2;
  }
  launch_kernel(op, kernel, {blocks_of(step), threads, sizeof(cuda_kernels::RowStorage)}, stream,
                params, static_cast<char*>(scratch));
}

}  // namespace

// Within what a block has without asking for more.
static_assert(sizeof(cuda_kernels::RowStorage) <= 48 * 1024);

int64_t sampler_cuda_scratch_bytes(const SamplerStepParams& params) {
  SamplerBlockWorkspace workspace;
  return blocks_of(params) * static_cast<int64_t>(workspace.split(nullptr, params.layout));
}

void sampler_step_cuda(const SamplerStepParams& params, void* scratch, void* stream) {
  if (params.batch == 0) return;
  const auto run = [&](auto* kernel) {
    launch("Sampler.sample", kernel, params, params, scratch, stream);
  };
  switch (params.dtype) {
    case DType::kFloat32:
      return run(&cuda_kernels::sampler_step_kernel<float>);
    case DType::kFloat16:
      return run(&cuda_kernels::sampler_step_kernel<Half>);
    case DType::kBFloat16:
      return run(&cuda_kernels::sampler_step_kernel<BFloat16>);
  }
}

void sampler_verify_cuda(const SamplerVerifyParams& params, void* scratch, void* stream) {
  if (params.step.batch == 0) return;
  const auto run = [&](auto* kernel) {
    launch("verify_draft", kernel, params, params.step, scratch, stream);
  };
  switch (params.step.dtype) {
    case DType::kFloat32:
      return run(&cuda_kernels::sampler_verify_kernel<float>);
    case DType::kFloat16:
      return run(&cuda_kernels::sampler_verify_kernel<Half>);
    case DType::kBFloat16:
      return run(&cuda_kernels::sampler_verify_kernel<BFloat16>);
  }
}

}  // namespace lmdecode::sampling
