// top_k_top_p_sample on CPU tensors.
#include "bindings/sampling.h"

#include "simd/cpu_capability.h"

namespace lmdecode {
namespace {

void run(const TopKTopPSampleParams& params, const Tensor&) { top_k_top_p_sample_cpu(params); }

struct NoGuard {
  explicit NoGuard(const Tensor&) {}
};

using Op = SampleOp<run, NoGuard>;

int64_t cpu_capability_number() { return static_cast<int64_t>(cpu_capability()); }

}  // namespace
}  // namespace lmdecode

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("top_k_top_p_sample", TORCH_BOX(&lmdecode::Op::call));
  m.impl("top_k_top_p_sample.out", TORCH_BOX(&lmdecode::Op::call_out));
}

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CompositeExplicitAutograd, m) {
  m.impl("cpu_capability", TORCH_BOX(&lmdecode::cpu_capability_number));
}
