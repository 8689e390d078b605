// Compiled once for each CPU capability, with LMD_SIMD naming it.
#include "attention/merge_attention_states.h"
#include "attention/pack.h"

namespace lmdecode::LMD_SIMD::attention {

using namespace lmdecode::attention;

namespace {

template <class T>
void merge_rows(const MergeAttentionStatesParams& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t token = row % p.tokens, head = row / p.tokens % p.heads;
    const int64_t sequence = row / p.tokens / p.heads;
    const auto place = [&](const AttentionStrides& s) {
      return sequence * s.sequence + head * s.head + token * s.token;
    };
    const MergeShares shares = MergeShares::of(p.states[0].lse[place(p.states[0].lse_strides)],
                                               p.states[1].lse[place(p.states[1].lse_strides)]);
    p.lse[place(p.lse_strides)] = shares.lse;
    T* out = static_cast<T*>(p.out) + place(p.out_strides);
    for (int64_t at = 0; at < p.size; at += kLanes) {
      F32 merged = splat(0.0f);
      for (int i = 0; i < 2; ++i) {
        if (shares.share[i] == 0.0) continue;
        const AttentionStrides& s = p.states[i].out_strides;
        const HeadRow<T> part = {static_cast<const T*>(p.states[i].out) + place(s), s.element,
                                 p.size};
        merged = accumulate(splat(shares.factor(i)), load_elements(part, at), merged);
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
  with_element_type(params.dtype,
                    [&](auto element) { merge_rows<decltype(element)>(params, begin, end); });
}

}  // namespace lmdecode::LMD_SIMD::attention
