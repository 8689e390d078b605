// merge_attention_states on a GPU: a warp a row.
#pragma once

#include "attention/attention_cuda_tuning.h"
#include "attention/element.cuh"
#include "attention/merge_attention_states.h"

namespace lmdecode::attention::cuda_kernels {

template <class T>
__global__ void __launch_bounds__(cuda_tuning::kMergeThreads)
    merge_attention_states_kernel(const MergeAttentionStatesParams p) {
  const int warps = static_cast<int>(blockDim.x) / cuda::kWarpSize;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * warps;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * warps + cuda::warp_id(); row < p.rows();
       row += stride) {
    const int64_t token = row % p.tokens, head = row / p.tokens % p.heads;
    const int64_t sequence = row / p.tokens / p.heads;
    const auto place = [&](const AttentionStrides& s) {
      return sequence * s.sequence + head * s.head + token * s.token;
    };
    const MergeShares shares = MergeShares::of(p.states[0].lse[place(p.states[0].lse_strides)],
                                               p.states[1].lse[place(p.states[1].lse_strides)]);
    if (cuda::lane_id() == 0) p.lse[place(p.lse_strides)] = shares.lse;
    T* const out = static_cast<T*>(p.out) + place(p.out_strides);
    for (int64_t at = cuda::lane_id(); at < p.size; at += cuda::kWarpSize) {
      float merged = 0.0f;
      for (int i = 0; i < 2; ++i) {
        if (shares.share[i] == 0.0) continue;
        const AttentionStrides& s = p.states[i].out_strides;
        const T* const part = static_cast<const T*>(p.states[i].out) + place(s);
        merged = __fmaf_rn(shares.factor(i), to_float(part[at * s.element]), merged);
      }
      store_element(out + at, merged);
    }
  }
}

}  // namespace lmdecode::attention::cuda_kernels
