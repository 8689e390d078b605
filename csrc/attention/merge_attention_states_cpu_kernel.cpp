// Compiled once for each CPU capability, with LMD_SIMD naming it.
#include "attention/merge_attention_states.h"
#include "attention/pack.h"

namespace lmdecode::LMD_SIMD {
namespace {

template <class T>
void merge_rows(const MergeAttentionStatesParams& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t token = row % p.tokens, head = row / p.tokens % p.heads;
    const int64_t sequence = row / p.tokens / p.heads;
    const auto place = [&](const AttentionStrides& s) {
      return sequence * s.sequence + head * s.head + token * s.token;
    };
    double lse[2], share[2];
    for (int i = 0; i < 2; ++i) {
      lse[i] = static_cast<double>(p.states[i].lse[place(p.states[i].lse_strides)]);
    }
    const double top = lse[0] > lse[1] ? lse[0] : lse[1];
    double sum = 0.0;
    for (int i = 0; i < 2; ++i) {
      share[i] = lse[i] > -__builtin_inf() ? __builtin_exp(lse[i] - top) : 0.0;
      if (lse[i] != lse[i]) share[i] = lse[i];
      sum += share[i];
    }
    p.lse[place(p.lse_strides)] =
        sum == 0.0 ? minus_infinity() : static_cast<float>(top + __builtin_log(sum));
    T* out = static_cast<T*>(p.out) + place(p.out_strides);
    for (int64_t at = 0; at < p.size; at += kLanes) {
      F32 merged = splat(0.0f);
      for (int i = 0; i < 2; ++i) {
        if (share[i] == 0.0) continue;
        const AttentionStrides& s = p.states[i].out_strides;
        const HeadRow<T> part = {static_cast<const T*>(p.states[i].out) + place(s), s.element,
                                 p.size};
        merged =
            accumulate(splat(static_cast<float>(share[i] / sum)), load_elements(part, at), merged);
      }
      if (at + kLanes <= p.size) {
        store_all(out + at, merged);
      } else {
        store_part(out + at, merged, p.size - at);
      }
    }
  }
}

}  // namespace

// Rows [begin, end), sequence by sequence, head by head.
void merge_attention_states_rows(const MergeAttentionStatesParams& params, int64_t begin,
                                 int64_t end) {
  switch (params.dtype) {
    case DType::kFloat32:
      return merge_rows<float>(params, begin, end);
    case DType::kFloat16:
      return merge_rows<Half>(params, begin, end);
    case DType::kBFloat16:
      return merge_rows<BFloat16>(params, begin, end);
  }
}

}  // namespace lmdecode::LMD_SIMD
