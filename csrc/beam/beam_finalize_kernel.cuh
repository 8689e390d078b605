// beam_finalize on a GPU: a block a request. A thread a slot gives open beams their places, a
// thread a place ranks it among all, and all threads move the sequences, each its columns.
#pragma once

#include "beam/beam_finalize.h"
#include "beam/beam_finalize_plan.h"
#include "beam/beam_tuning.h"
#include "common/cuda_intrinsics.cuh"

namespace lmdecode::beam::cuda_kernels {

// Shared memory of a block, followed by int32_t places[ranked].
struct BeamFinalizeStorage {
  int32_t open_beams[1];  // [num_groups * hypotheses]
};

LMD_HOST_DEVICE size_t beam_finalize_shared_bytes(const BeamFinalizeParams& params) {
  return static_cast<size_t>(params.num_groups * params.state.hypotheses + params.ranked()) *
         sizeof(int32_t);
}

__global__ void __launch_bounds__(tuning::kStepThreads)
    beam_finalize_kernel(const LMD_KERNEL_PARAM BeamFinalizeParams params) {
  int32_t* const open_beams = cuda::shared_storage<BeamFinalizeStorage>().open_beams;
  const int64_t hypotheses = params.state.hypotheses;
  const int64_t count = params.num_groups * hypotheses;
  const int64_t ranked = params.ranked();
  int32_t* const places = open_beams + count;
  const Columns columns{threadIdx.x, blockDim.x};
  for (int64_t request = blockIdx.x; request < params.requests; request += gridDim.x) {
    const int64_t first_entry = request * params.num_groups;
    for (int64_t group = columns.first; group < params.num_groups; group += columns.step) {
      add_open_beams(params, first_entry + group, open_beams + group * hypotheses);
    }
    for (int64_t rank = columns.first; rank < ranked; rank += columns.step) {
      places[rank] = kNoPlace;
    }
    __syncthreads();
    for (int64_t group = 0; params.add_open && group < params.num_groups; ++group) {
      copy_open_beams(params, first_entry + group, open_beams + group * hypotheses, columns);
    }
    for (int64_t place = columns.first; place < count; place += columns.step) {
      const int64_t rank = hypothesis_rank(params, request, place);
      if (rank >= 0 && rank < ranked) places[rank] = static_cast<int32_t>(place);
    }
#if !defined(LMD_PLANT_MISSING_BARRIER)  // a test leaves it out to see that this is noticed
    __syncthreads();
#endif
    for (int64_t rank = 0; rank < params.num_return_sequences; ++rank) {
      write_result(params, request, rank, rank < ranked ? places[rank] : kNoPlace, columns);
    }
    __syncthreads();  // the next request's places take the place of these
  }
}

}  // namespace lmdecode::beam::cuda_kernels
