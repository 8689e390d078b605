// Compiled once for each CPU capability, with LMD_SIMD naming it.
#include "sampling/sampler_cpu_kernel.h"

#include "sampling/sampler_verify.h"
#include "sampling/sampler_workspace.h"

namespace lmdecode::LMD_SIMD::sampling {

using namespace lmdecode::sampling;

namespace {

// The memory of a thread, dealt out.
struct Scratch {
  CandidateList list;
  SamplerScratch rows;
  float* row;  // [vocab] a row that was gathered

  Scratch(void* memory, const SamplerStepParams& params) {
    SamplerWorkspace workspace;
    split_sampler_workspace(memory, params.layout, &workspace);
    const SamplingWorkspace w = split_sampling_workspace(workspace.lists, params.vocab);
    list = list_in(w);
    rows = {workspace.row, workspace.touched};
    row = w.row;
  }

  template <class T>
  const float* gather(const T* x, const SamplerStepParams& params) const {
    return gather_row(x, params.vocab, params.logits_vocab_stride, row);
  }
};

template <class T>
void run_rows(const SamplerStepParams& params, int64_t begin, int64_t end, void* memory) {
  const Scratch scratch(memory, params);
  const T* logits = static_cast<const T*>(params.logits);
  if (params.logits_vocab_stride == 1) {
    CpuSamplerStep<T> kernel(params, scratch.list, scratch.rows);
    for (int64_t row = begin; row < end; ++row)
      kernel.run(logits + row * params.logits_row_stride, row);
    return;
  }
  CpuSamplerStep<float> kernel(params, scratch.list, scratch.rows);
  for (int64_t row = begin; row < end; ++row)
    kernel.run(scratch.gather(logits + row * params.logits_row_stride, params), row);
}

// One sequence: from the text, then from each accepted draft.
template <class Kernel, class RowAt>
void verify_row(const SamplerVerifyParams& v, SamplerStepParams* step, int64_t row,
                CandidateList list, Kernel* kernel, const RowAt& row_at) {
  const int64_t drafts = v.num_draft ? v.num_draft[row] : v.drafts;
  const int64_t* draft = v.draft + row * v.drafts;
  int64_t* tokens = v.tokens + row * (v.drafts + 1);
  int64_t* path = v.path + row * v.drafts;
  const int32_t* bitmask = step->bitmask;
  uint8_t status = 0;
  int64_t accepted = 0, node = -1;
  for (;;) {
    // The first child of this draft; in a chain, the next draft.
    const auto next_child = [&](int64_t after) {
      if (v.parents == nullptr) return after == node + 1 && after < drafts ? after : drafts;
      while (after < drafts && v.parents[row * v.drafts + after] != node) ++after;
      return after;
    };
    int64_t child = next_child(node + 1);
    DraftedToken drafted;
    const bool rejects = v.rejection && child < drafts;
    if (rejects) {
      const float* logits =
          v.draft_logits ? v.draft_logits + (row * v.drafts + child) * step->vocab : nullptr;
      drafted =
          drafted_token(draft[child], logits, step->vocab, mass_fraction_bits(step->vocab), &list);
    }
    if (bitmask) step->bitmask = bitmask + (node + 1) * v.bitmask_draft_stride;
    kernel->run(row_at(node + 1), row, rejects ? &drafted : nullptr);
    status |= step->status[row];
    const int64_t token = step->index[row];
    tokens[accepted] = token;
    while (child < drafts && draft[child] != token) child = next_child(child + 1);
    // A row of nothing stands for no draw: no draft is accepted there.
    if (child >= drafts || token < 0 || (step->status[row] & kStatusEmpty)) break;
    path[accepted++] = node = child;
  }
  step->bitmask = bitmask;
  step->status[row] = status;
  v.num_accepted[row] = accepted;
  for (int64_t i = accepted + 1; i <= v.drafts; ++i) tokens[i] = -1;
  for (int64_t i = accepted; i < v.drafts; ++i) path[i] = -1;
}

template <class T>
void verify_rows(const SamplerVerifyParams& v, int64_t begin, int64_t end, void* memory) {
  SamplerStepParams step = v.step;
  const Scratch scratch(memory, step);
  const T* logits = static_cast<const T*>(step.logits);
  const auto at = [&](int64_t row, int64_t i) {
    return logits + row * step.logits_row_stride + i * v.logits_draft_stride;
  };
  if (step.logits_vocab_stride == 1) {
    CpuSamplerStep<T> kernel(step, scratch.list, scratch.rows);
    for (int64_t row = begin; row < end; ++row) {
      verify_row(v, &step, row, scratch.list, &kernel, [&](int64_t i) { return at(row, i); });
    }
    return;
  }
  CpuSamplerStep<float> kernel(step, scratch.list, scratch.rows);
  for (int64_t row = begin; row < end; ++row) {
    verify_row(v, &step, row, scratch.list, &kernel,
               [&](int64_t i) { return scratch.gather(at(row, i), step); });
  }
}

}  // namespace

void sampler_step_rows(const SamplerStepParams& params, int64_t begin, int64_t end,
                       void* workspace) {
  with_element_type(params.dtype, [&](auto element) {
    run_rows<decltype(element)>(params, begin, end, workspace);
  });
}

void sampler_verify_rows(const SamplerVerifyParams& params, int64_t begin, int64_t end,
                         void* workspace) {
  with_element_type(params.step.dtype, [&](auto element) {
    verify_rows<decltype(element)>(params, begin, end, workspace);
  });
}

}  // namespace lmdecode::LMD_SIMD::sampling
