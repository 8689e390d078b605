// Rows to threads.
#include "common/parallel_rows.h"
#include "sampling/sampler_verify.h"
#include "sampling/sampler_workspace.h"
#include "sampling/sampling_tuning.h"

namespace lmdecode::sampling {

namespace {

template <class Body>
void run(const char* op, const SamplerStepParams& params, int64_t rows_each, const Body& body) {
  using namespace tuning;
  const double row_time =
      static_cast<double>(rows_each) *
      (kRowNanoseconds + static_cast<double>(params.vocab) * kTopKNanosecondsPerLogit);
  SamplerWorkspace unused;
  const size_t bytes = split_sampler_workspace(nullptr, params.layout, &unused);
  parallel_rows(op, params.batch, row_time, bytes, body,
                [&] { return "; logits has a vocabulary of " + std::to_string(params.vocab); });
}

}  // namespace

void sampler_step_cpu(const SamplerStepParams& params) {
  const auto rows = LMD_SELECT_KERNEL(sampling, sampler_step_rows);
  run("sampler_step_", params, 1,
      [&](int64_t begin, int64_t end, void* workspace) { rows(params, begin, end, workspace); });
}

void sampler_verify_cpu(const SamplerVerifyParams& params) {
  const auto rows = LMD_SELECT_KERNEL(sampling, sampler_verify_rows);
  run("sampler_verify_", params.step, params.drafts + 1,
      [&](int64_t begin, int64_t end, void* workspace) { rows(params, begin, end, workspace); });
}

}  // namespace lmdecode::sampling
