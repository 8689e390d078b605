// top_k_top_p_sample on CPU tensors.
#include "bindings/top_k_top_p_sample.h"

namespace lmdecode::sampling {
namespace {

void run(const TopKTopPSampleParams& params, const Tensor&) { top_k_top_p_sample_cpu(params); }

using Op = SampleOp<run, NoGuard>;

}  // namespace
}  // namespace lmdecode::sampling

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("top_k_top_p_sample", TORCH_BOX(&lmdecode::sampling::Op::call));
  m.impl("top_k_top_p_sample.out", TORCH_BOX(&lmdecode::sampling::Op::call_out));
}
