// beam_step on a GPU: a block a request. One thread decides; then each thread owns some columns of
// the sequences and carries them through all copies, so that nothing waits between these: first to
// the hypotheses that close, then from beam to beam, in place, the temporary row of a cycle in a
// register. docs/reference/beam.md has the semantics.
#pragma once

#include "beam/beam_step.h"
#include "beam/beam_step_plan.h"
#include "beam/beam_tuning.h"
#include "common/cuda_intrinsics.cuh"
#include "common/row_copies.h"

namespace lmdecode::beam::cuda_kernels {

// Shared memory of a block, followed by RowCopy copies[max_row_copies(beams)], int32_t
// readers[beams], int32_t parents[beams], float log_probs[beams], int32_t sources[hypotheses].
struct BeamStepStorage {
  BeamStepPlan plan;
  int32_t copy_count;
};

LMD_HOST_DEVICE size_t beam_step_shared_bytes(int64_t beams, int64_t hypotheses) {
  return sizeof(BeamStepStorage) + static_cast<size_t>(max_row_copies(beams)) * sizeof(RowCopy) +
         static_cast<size_t>(3 * beams + hypotheses) * sizeof(int32_t);
}

// Prefetches the data that one thread reads, which would wait for one load after another: all
// threads, an address each.
__device__ inline void prefetch_request(const BeamStepParams& params, int64_t request) {
  const auto columns_of = [&](const auto& rows, int64_t columns) {
    if (rows.data == nullptr) return;
    for (int64_t i = threadIdx.x; i < columns; i += blockDim.x) {
      cuda::prefetch(rows.data + request * rows.request_stride + i * rows.stride);
    }
  };
  const BeamSearchState& state = params.state;
  columns_of(params.scores, params.num_candidates);
  columns_of(params.tokens, params.num_candidates);
  columns_of(params.beams, params.num_candidates);
  columns_of(params.log_probs, params.num_candidates);
  columns_of(params.stopped, params.num_candidates);
  columns_of(params.bonus, state.beams);
  columns_of(params.status, 1);
  const int64_t slot = params.slots.data == nullptr ? request : params.slots.at(request, 0);
  if (slot < 0 || slot >= state.slots) return;
  const auto list_of = [&](const auto* values, int64_t count) {
    if (values == nullptr) return;
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
      cuda::prefetch(values + slot * count + i);
    }
  };
  list_of(state.hypothesis_scores, state.hypotheses);
  list_of(state.hypothesis_numbers, state.hypotheses);
  list_of(state.worst_scores, 1);
  list_of(state.lengths, 1);
  list_of(state.done, 1);
  list_of(state.status, 1);
  const BeamSearchParameters& parameters = params.parameters;
  list_of(parameters.num_beams, 1);
  list_of(parameters.num_hypotheses, 1);
  list_of(parameters.prompt_lengths, 1);
  list_of(parameters.max_lengths, 1);
  list_of(parameters.length_penalty, 1);
  list_of(parameters.early_stopping, 1);
  list_of(parameters.end_tokens, parameters.num_end_tokens);
  list_of(parameters.pad_tokens, 1);
}

// One thread's work: the plan, and the order in which the beams move.
__device__ inline void decide_beam_step(const BeamStepParams& params, int64_t request,
                                        BeamStepStorage& storage, RowCopy* copies) {
  const int64_t beams = params.state.beams;
  int32_t* const readers = reinterpret_cast<int32_t*>(copies + max_row_copies(beams));
  BeamStepPlan plan;
  plan.parents = readers + beams;
  plan.log_probs = reinterpret_cast<float*>(plan.parents + beams);
  plan.sources = reinterpret_cast<int32_t*>(plan.log_probs + beams);
  plan_beam_step(params, request, plan);
  if (plan.advances) {
    const int32_t num_beams = static_cast<int32_t>(plan.num_beams);
    storage.copy_count = order_row_copies_of(plan.parents, num_beams, readers, copies);
  }
  storage.plan = plan;
}

// Columns first, first + step, ... of the rows of a slot.
template <class T>
__device__ void advance_columns(T* rows, int64_t capacity, int64_t length, const RowCopy* copies,
                                int32_t copy_count, Columns columns) {
  if (capacity == 0 || copy_count == 0) return;
  for (int64_t column = columns.first; column < length; column += columns.step) {
    T temporary = 0;
    for (int32_t i = 0; i < copy_count; ++i) {
      const RowCopy copy = copies[i];
      const T value = copy.from == kTemporaryRow ? temporary : rows[copy.from * capacity + column];
      if (copy.to == kTemporaryRow) {
        temporary = value;
      } else {
        rows[copy.to * capacity + column] = value;
      }
    }
  }
}

__device__ inline void advance_beams(const BeamStepParams& params, const BeamStepPlan& plan,
                                     const RowCopy* copies, int32_t copy_count, Columns columns) {
  const BeamSearchState& state = params.state;
  const int64_t first = plan.slot * state.beams;
  int64_t* const sequences = state.sequences + first * state.capacity;
  float* const log_probs = state.log_probs + first * state.log_prob_capacity;
  int32_t* const beam_indices = state.beam_indices + first * state.beam_index_capacity;
  advance_columns(sequences, state.capacity, plan.length, copies, copy_count, columns);
  advance_columns(log_probs, state.log_prob_capacity, plan.length, copies, copy_count, columns);
  advance_columns(beam_indices, state.beam_index_capacity, plan.length, copies, copy_count,
                  columns);
  for (int64_t beam = columns.first; beam < plan.num_beams; beam += columns.step) {
    sequences[beam * state.capacity + plan.length] = params.next_tokens[plan.row + beam];
    if (state.log_prob_capacity > 0) {
      log_probs[beam * state.log_prob_capacity + plan.length] = plan.log_probs[beam];
    }
    if (state.beam_index_capacity > 0) {
      beam_indices[beam * state.beam_index_capacity + plan.length] = plan.parents[beam];
    }
  }
}

// A request, by all threads of a block; before(): the work of the one that decides, first.
template <class Before>
__device__ void step_request(const BeamStepParams& params, int64_t request,
                             BeamStepStorage& storage, Columns columns, Before before) {
  RowCopy* const copies = reinterpret_cast<RowCopy*>(&storage + 1);
  prefetch_request(params, request);
  if (threadIdx.x == 0) {
    before();
    decide_beam_step(params, request, storage, copies);
  }
#if !defined(LMD_PLANT_MISSING_BARRIER)  // a test leaves it out to see that this is noticed
  __syncthreads();
#endif
  const BeamStepPlan& plan = storage.plan;
  if (plan.closes) close_hypotheses(params, request, plan, columns);
  if (plan.advances) advance_beams(params, plan, copies, storage.copy_count, columns);
}

inline __global__ void __launch_bounds__(tuning::kStepThreads)
    beam_step_kernel(const LMD_KERNEL_PARAM BeamStepParams params) {
  BeamStepStorage& storage = cuda::shared_storage<BeamStepStorage>();
  const Columns columns{threadIdx.x, blockDim.x};
  for (int64_t request = blockIdx.x; request < params.requests; request += gridDim.x) {
    step_request(params, request, storage, columns, [] {});
    __syncthreads();  // the next plan takes the place of this one
  }
}

}  // namespace lmdecode::beam::cuda_kernels
