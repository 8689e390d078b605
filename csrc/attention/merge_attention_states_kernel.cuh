// merge_attention_states on a GPU: a warp a row, 16 bytes a lane where the rows lie so.
#pragma once

#include "attention/attention_cuda_tuning.h"
#include "attention/element.cuh"
#include "attention/merge_attention_states.h"
#include "common/element_vector.cuh"

namespace lmdecode::attention::cuda_kernels {

template <class T>
__global__ void __launch_bounds__(cuda_tuning::kMergeThreads)
    merge_attention_states_kernel(const MergeAttentionStatesParams p) {
  using Vector = ElementVector<T>;
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
    const T* parts[2];
    float factors[2];
    bool in_vectors = p.size % Vector::kSize == 0 && Vector::fits(out);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const AttentionStrides& s = p.states[i].out_strides;
      // A part of no weight is not read.
      parts[i] =
          shares.share[i] == 0.0 ? nullptr : static_cast<const T*>(p.states[i].out) + place(s);
      factors[i] = parts[i] == nullptr ? 0.0f : shares.factor(i);
      in_vectors =
          in_vectors && (parts[i] == nullptr || (s.element == 1 && Vector::fits(parts[i])));
    }
    const int64_t step = in_vectors ? Vector::kSize : 1;
    for (int64_t at = cuda::lane_id() * step; at < p.size; at += cuda::kWarpSize * step) {
      if (in_vectors) {
        float merged[Vector::kSize] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (parts[i] == nullptr) continue;
          const Vector part = Vector::load(parts[i] + at);
#pragma unroll
          for (int e = 0; e < Vector::kSize; ++e) {
            merged[e] = __fmaf_rn(part[e], factors[i], merged[e]);
          }
        }
        Vector result;
#pragma unroll
        for (int e = 0; e < Vector::kSize; ++e) store_element(result.elements + e, merged[e]);
        result.store(out + at);
        continue;
      }
      float merged = 0.0f;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (parts[i] == nullptr) continue;
        const float value = to_float(parts[i][at * p.states[i].out_strides.element]);
        merged = __fmaf_rn(value, factors[i], merged);
      }
      store_element(out + at, merged);
    }
  }
}

}  // namespace lmdecode::attention::cuda_kernels
