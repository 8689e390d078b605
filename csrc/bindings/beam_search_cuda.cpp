// beam_step and beam_finalize on CUDA tensors.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "bindings/beam_search.h"

namespace lmdecode {

namespace {

struct Cuda {
  struct Guard {
    explicit Guard(const Tensor& state) : guard(state.get_device_index()) {}
    torch::stable::accelerator::DeviceGuard guard;
  };
  // Nothing waits for what the tensors hold: the kernels hold it to its ranges.
  template <class Params>
  static void check(const Params&) {}
  static void run(const BeamStepParams& params, const Tensor& state) {
    beam_step_cuda(params, stream_of(state));
  }
  static void run(const BeamFinalizeParams& params, const Tensor& state) {
    beam_finalize_cuda(params, stream_of(state));
  }

 private:
  static void* stream_of(const Tensor& state) {
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_get_current_cuda_stream(state.get_device_index(), &stream));
    return stream;
  }
};

}  // namespace
}  // namespace lmdecode

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  using namespace lmdecode;
  m.impl("beam_step", TORCH_BOX((&BeamStepOp<Cuda>::call)));
  m.impl("beam_finalize", TORCH_BOX((&BeamFinalizeOp<Cuda>::call)));
}
