// Launches update_beam_indirection_: no allocation and no wait, so that a CUDA graph can capture
// it.
#include <sstream>
#include <stdexcept>

#include "common/cuda_launch.h"
#include "kv_cache/update_beam_indirection.h"
#include "kv_cache/update_beam_indirection_kernel.cuh"

namespace lmdecode::kv_cache {

void update_beam_indirection_cuda(const BeamIndirectionParams& params, void* stream) {
  constexpr const char* kOp = "update_beam_indirection_";
  const auto kernel = &beam_indirection_cuda::update_beam_indirection_kernel;
  const int64_t rows = params.parents.rows;
  if (rows == 0 || params.capacity == 0) return;
  const CurrentDevice device(kOp);
  if (rows > max_beam_indirection_rows(device.shared_limit)) {
    std::ostringstream message;
    message << kOp << ": parents has shape [" << rows << "]; expected at most "
            << max_beam_indirection_rows(device.shared_limit) << " rows on this device";
    throw std::invalid_argument(message.str());
  }
  prepare_kernel(kOp, kernel, device);
  const BeamIndirectionLaunch launch =
      beam_indirection_launch(params, device.multiprocessors, device.shared_limit);
  launch_kernel(kOp, kernel,
                {launch.blocks, beam_indirection_cuda_tuning::kThreads, launch.shared_bytes},
                stream, params, launch);
}

}  // namespace lmdecode::kv_cache
