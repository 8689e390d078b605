// Runs the calls of a sampler on the CPU and, emulated, its CUDA kernels.
#pragma once

#include <cstdlib>
#include <memory>

#include "sampler_calls.h"
#include "sampling/sampler_kernel.cuh"
#include "sampling/sampler_verify.h"

namespace lmdecode::sampling::test {

using Memory = std::unique_ptr<void, void (*)(void*)>;

inline Memory aligned(size_t bytes) {
  return Memory(std::aligned_alloc(64, (bytes + 63) / 64 * 64), std::free);
}

struct OnCpu {
  Memory workspace;

  explicit OnCpu(const SamplerLayout& layout) : workspace(nullptr, std::free) {
    SamplerWorkspace unused;
    workspace = aligned(split_sampler_workspace(nullptr, layout, &unused));
  }
  void operator()(const SamplerStepParams& p) const {
    default_::sampling::sampler_step_rows(p, 0, p.batch, workspace.get());
  }
  void operator()(const SamplerVerifyParams& v) const {
    default_::sampling::sampler_verify_rows(v, 0, v.step.batch, workspace.get());
  }
};

struct Emulated {
  unsigned threads, blocks;
  uint64_t schedule;

  void operator()(const SamplerStepParams& p) const {
    launch(p, p,
           {&cuda_kernels::sampler_step_kernel<float>, &cuda_kernels::sampler_step_kernel<Half>,
            &cuda_kernels::sampler_step_kernel<BFloat16>});
  }
  void operator()(const SamplerVerifyParams& v) const {
    launch(v, v.step,
           {&cuda_kernels::sampler_verify_kernel<float>, &cuda_kernels::sampler_verify_kernel<Half>,
            &cuda_kernels::sampler_verify_kernel<BFloat16>});
  }

 private:
  // Kernels in the order of DType.
  template <class Params>
  void launch(const Params& params, const SamplerStepParams& step,
              std::initializer_list<void (*)(Params, char*)> kernels) const {
    SamplerBlockWorkspace workspace;
    const size_t bytes = workspace.split(nullptr, step.layout);
    const Buffer<char> scratch(static_cast<int64_t>(bytes * blocks));
    emulation::launch(kernels.begin()[static_cast<int>(step.dtype)], dim3(blocks), dim3(threads), 1,
                      sizeof(cuda_kernels::RowStorage), schedule, params, scratch.data());
  }
};

inline StepResult call(const auto& run, const StepCase& c, const Rows& rows) {
  return step(run, c, rows);
}
inline DraftResult call(const auto& run, const DraftCase& c, const Rows& rows) {
  return verify(run, c, rows);
}

}  // namespace lmdecode::sampling::test
