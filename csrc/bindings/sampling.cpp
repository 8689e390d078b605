// top_k_top_p_sample on CPU tensors.
#include "bindings/sampling.h"

#include "simd/cpu_capability.h"

namespace lmdecode::sampling {
namespace {

void run(const TopKTopPSampleParams& params, const Tensor&) { top_k_top_p_sample_cpu(params); }

struct NoGuard {
  explicit NoGuard(const Tensor&) {}
};

using Op = SampleOp<run, NoGuard>;

int64_t cpu_capability_number() { return static_cast<int64_t>(cpu_capability()); }

}  // namespace
}  // namespace lmdecode::sampling

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("top_k_top_p_sample", TORCH_BOX(&lmdecode::sampling::Op::call));
  m.impl("top_k_top_p_sample.out", TORCH_BOX(&lmdecode::sampling::Op::call_out));
}

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CompositeExplicitAutograd, m) {
  m.impl("cpu_capability", TORCH_BOX(&lmdecode::sampling::cpu_capability_number));
}
