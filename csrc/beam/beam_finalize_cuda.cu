// Launches beam_finalize.
#include "beam/beam_finalize.h"
#include "beam/beam_finalize_kernel.cuh"
#include "beam/request_launch.h"

namespace lmdecode::beam {

void beam_finalize_cuda(const BeamFinalizeParams& params, void* stream) {
  launch_requests("beam_finalize", &cuda_kernels::beam_finalize_kernel, params.requests,
                  cuda_kernels::beam_finalize_shared_bytes(params),
                  "(4 to 8 bytes a hypothesis, of all groups)", params, stream);
}

}  // namespace lmdecode::beam
