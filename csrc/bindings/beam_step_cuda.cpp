// beam_step on CUDA tensors.
#include "bindings/beam_step.h"
#include "bindings/cuda_stream.h"

namespace lmdecode::beam {
namespace {

struct Cuda {
  using Guard = CudaGuard;
  // Nothing waits for what the tensors hold: the kernels hold it to its ranges.
  static void check(const BeamStepParams&) {}
  static void run(const BeamStepParams& params, const Tensor& state) {
    beam_step_cuda(params, current_cuda_stream(state));
  }
};

}  // namespace
}  // namespace lmdecode::beam

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  using namespace lmdecode;
  using namespace lmdecode::beam;
  m.impl("beam_step", TORCH_BOX((&BeamStepOp<Cuda>::call)));
}
