// Launches beam_step.
#include "beam/beam_step.h"
#include "beam/beam_step_kernel.cuh"
#include "beam/request_launch.h"

namespace lmdecode::beam {

void beam_step_cuda(const BeamStepParams& params, void* stream) {
  launch_requests("beam_step", &cuda_kernels::beam_step_kernel, params.requests,
                  cuda_kernels::beam_step_shared_bytes(params.state.beams, params.state.hypotheses),
                  kStepTakes, params, stream);
}

}  // namespace lmdecode::beam
