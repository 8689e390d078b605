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
    // Those of the two that have a share.
    HeadRow<T> parts[2];
    F32 factors[2];
    int count = 0;
    for (int i = 0; i < 2; ++i) {
      if (shares.share[i] == 0.0) continue;
      const AttentionStrides& s = p.states[i].out_strides;
      parts[count] = {static_cast<const T*>(p.states[i].out) + place(s), s.element, p.size};
      factors[count++] = splat(shares.factor(i));
    }
    const auto merged = [&](int64_t at) {
      F32 sum = splat(0.0f);
      for (int i = 0; i < count; ++i) {
        sum = accumulate(factors[i], load_elements(parts[i], at), sum);
      }
      return sum;
    };
    T* const out = static_cast<T*>(p.out) + place(p.out_strides);
    int64_t at = 0;
    for (; at + kLanes <= p.size; at += kLanes) store_all(out + at, merged(at));
    if (at < p.size) store_part(out + at, merged(at), p.size - at);
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
