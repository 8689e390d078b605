// The kernels of a Sampler: a block of threads takes a row, or a sequence and its drafts, at a
// time.
#pragma once

#include "sampling/sampler_row_step.cuh"
#include "sampling/sampler_verify.h"

namespace lmdecode::sampling::cuda_kernels {

__device__ inline SamplerBlockWorkspace block_workspace(const SamplerStepParams& params,
                                                        char* scratch) {
  SamplerBlockWorkspace workspace;
  const size_t bytes = workspace.split(nullptr, params.layout);
  workspace.split(scratch + blockIdx.x * bytes, params.layout);
  return workspace;
}

template <class T>
__global__ void __launch_bounds__(cuda_tuning::kMaxThreads, 1)
    sampler_step_kernel(const LMD_KERNEL_PARAM SamplerStepParams params, char* scratch) {
  CudaSamplerStep<T> kernel(params, cuda::shared_storage<RowStorage>(),
                            block_workspace(params, scratch));
  const T* logits = static_cast<const T*>(params.logits);
  for (int64_t row = blockIdx.x; row < params.batch; row += gridDim.x) {
    const int32_t* bitmask =
        params.bitmask ? params.bitmask + row * params.bitmask_row_stride : nullptr;
    kernel.run(logits + row * params.logits_row_stride, row, bitmask, nullptr, 1);
  }
}

// One sequence: from the text, then from each accepted draft. All threads see the same numbers and
// go the same way; the first writes.
template <class T>
__device__ void verify_row(const SamplerVerifyParams& v, int64_t row, CudaSamplerStep<T>* kernel) {
  const SamplerStepParams& step = v.step;
  const int64_t drafts = v.num_draft ? v.num_draft[row] : v.drafts;
  const int64_t* draft = v.draft + row * v.drafts;
  int64_t* tokens = v.tokens + row * (v.drafts + 1);
  int64_t* path = v.path + row * v.drafts;
  const T* logits = static_cast<const T*>(step.logits) + row * step.logits_row_stride;
  const int32_t* bitmask = step.bitmask ? step.bitmask + row * step.bitmask_row_stride : nullptr;
  uint8_t status = 0;
  int64_t accepted = 0, node = -1;
  for (;;) {
    if (drafts < 0 || drafts > v.drafts) {
      status = kernel->refuse(row).status;
      if (threadIdx.x == 0) tokens[0] = -1;
      break;
    }
    // The first draft behind this one; with a chain the next one alone.
    const auto next_child = [&](int64_t after) {
      if (v.parents == nullptr) return after == node + 1 && after < drafts ? after : drafts;
      while (after < drafts && v.parents[row * v.drafts + after] != node) ++after;
      return after;
    };
    int64_t child = next_child(node + 1);
    DraftedToken drafted{};
    const bool rejects = v.rejection && child < drafts;
    if (rejects) {
      drafted = kernel->drafted_token(
          draft[child],
          v.draft_logits ? v.draft_logits + (row * v.drafts + child) * step.vocab : nullptr);
    }
    const auto choice =
        kernel->run(logits + (node + 1) * v.logits_draft_stride, row,
                    bitmask ? bitmask + (node + 1) * v.bitmask_draft_stride : nullptr,
                    // A row that is refused is so at once: there is room for as much as may come.
                    rejects ? &drafted : nullptr, v.drafts + 1 - accepted);
    status |= choice.status;
    if (threadIdx.x == 0) tokens[accepted] = choice.token;
    while (child < drafts && draft[child] != choice.token) child = next_child(child + 1);
    // A row of nothing stands for no draw: no draft is accepted there.
    if (child >= drafts || choice.token < 0 || (choice.status & kStatusEmpty)) break;
    if (threadIdx.x == 0) path[accepted] = child;
    node = child;
    ++accepted;
  }
  if (threadIdx.x != 0) return;
  step.status[row] = status;
  v.num_accepted[row] = accepted;
  for (int64_t i = accepted + 1; i <= v.drafts; ++i) tokens[i] = -1;
  for (int64_t i = accepted; i < v.drafts; ++i) path[i] = -1;
}

template <class T>
__global__ void __launch_bounds__(cuda_tuning::kMaxThreads, 1)
    sampler_verify_kernel(const LMD_KERNEL_PARAM SamplerVerifyParams params, char* scratch) {
  CudaSamplerStep<T> kernel(params.step, cuda::shared_storage<RowStorage>(),
                            block_workspace(params.step, scratch));
  for (int64_t row = blockIdx.x; row < params.step.batch; row += gridDim.x) {
    verify_row(params, row, &kernel);
  }
}

}  // namespace lmdecode::sampling::cuda_kernels
