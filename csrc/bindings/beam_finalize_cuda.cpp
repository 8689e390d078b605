// beam_finalize on CUDA tensors.
#include "bindings/beam_finalize.h"
#include "bindings/cuda_stream.h"

namespace lmdecode::beam {
namespace {

struct Cuda {
  using Guard = CudaGuard;
  // Nothing waits for what the tensors hold: the kernels hold it to its ranges.
  static void check(const BeamFinalizeParams&) {}
  static void run(const BeamFinalizeParams& params, const Tensor& state) {
    beam_finalize_cuda(params, current_cuda_stream(state));
  }
};

}  // namespace
}  // namespace lmdecode::beam

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  using namespace lmdecode;
  using namespace lmdecode::beam;
  m.impl("beam_finalize", TORCH_BOX((&BeamFinalizeOp<Cuda>::call)));
}
