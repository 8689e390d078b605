// Softcap, ALiBi and masks: applied to the scores of a row between the product and the softmax.
#pragma once

#include "attention/attention_vec.h"
#include "attention/sliding_window_attention.h"

namespace lmdecode::LMD_SIMD::attention {

using namespace lmdecode::attention;

inline float mask_term(float value) { return value > kMaskedScore ? value : minus_infinity(); }

// terms[key] = what a mask adds to the score of key first + key, for the keys of `range`. NaN in a
// mask hides.
template <class T>
void add_mask_terms(const T* row, int64_t stride, int64_t first, KeyRange range, float* terms) {
  const T* p = row + first * stride;
  for (int64_t key = range.begin; key < range.end; ++key) {
    terms[key] += mask_term(to_float(p[key * stride]));
  }
}

inline void hide_keys(const bool* row, int64_t stride, bool hidden, int64_t first, KeyRange range,
                      float* terms) {
  const bool* p = row + first * stride;
  for (int64_t key = range.begin; key < range.end; ++key) {
    if (p[key * stride] == hidden) terms[key] = minus_infinity();
  }
}

// The terms of one row for keys first + range: -inf hides a key.
inline void row_terms(const SlidingWindowAttentionParams& p, int64_t sequence, int64_t head,
                      int64_t token, int64_t first, KeyRange range, float* terms) {
  for (int64_t key = range.begin; key < range.end; ++key) terms[key] = 0.0f;
  const AttentionStrides& s = p.mask_strides;
  const int64_t at = sequence * s.sequence + head * s.head + token * s.token;
  switch (p.mask_type) {
    case MaskType::kNone:
      break;
    case MaskType::kBool:
      hide_keys(static_cast<const bool*>(p.mask) + at, s.element, !p.mask_true_is_visible, first,
                range, terms);
      break;
    case MaskType::kFloat32:
      add_mask_terms(static_cast<const float*>(p.mask) + at, s.element, first, range, terms);
      break;
    case MaskType::kFloat16:
      add_mask_terms(static_cast<const Half*>(p.mask) + at, s.element, first, range, terms);
      break;
    case MaskType::kBFloat16:
      add_mask_terms(static_cast<const BFloat16*>(p.mask) + at, s.element, first, range, terms);
      break;
  }
  if (p.key_padding != nullptr) {
    hide_keys(p.key_padding + sequence * p.key_padding_strides.sequence,
              p.key_padding_strides.token, false, first, range, terms);
  }
}

// Groups of kGroup keys of [begin, end) in which some row sees a key; the rows' terms are `stride`
// apart.
template <int64_t kGroup>
KeyRange groups_with_visible_keys(const float* terms, int64_t stride, int64_t rows, int64_t begin,
                                  int64_t end) {
  const auto sees = [&](int64_t group) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t key = group; key < group + kGroup; ++key) {
        if (terms[r * stride + key] > minus_infinity()) return true;
      }
    }
    return false;
  };
  while (begin < end && !sees(begin)) begin += kGroup;
  while (begin < end && !sees(end - kGroup)) end -= kGroup;
  return {begin, end};
}

// Turns products into scores. Does not hide keys outside a range.
struct ScoreRule {
  float scale;
  float softcap;       // 0: none
  float slope;         // of ALiBi, 0: none
  float distance;      // of the row's position from key 0 of the step
  const float* terms;  // [keys], or null

  // Of a row, for a step of keys from `first` on.
  static ScoreRule of(const SlidingWindowAttentionParams& p, int64_t sequence, int64_t head,
                      int64_t token, int64_t first, const float* terms) {
    ScoreRule rule = {p.scale, p.softcap, 0.0f, 0.0f, terms};
    if (p.alibi_slopes != nullptr) {
      rule.slope = p.alibi_slopes[sequence * p.alibi_sequence_stride + head];
      rule.distance = static_cast<float>(p.position(sequence, token) - first);
    }
    return rule;
  }

  void apply(float* scores, int64_t begin, int64_t end) const {
    const F32 minus_inf = splat(minus_infinity());
    for (int64_t key = begin; key < end; key += kLanes) {
      F32 x = load(scores + key) * splat(scale);
      if (softcap != 0.0f) x = splat(softcap) * tanh_of(x / splat(softcap));
      if (slope != 0.0f) {
        const F32 at = splat(distance - static_cast<float>(key)) - convert_u32(iota_u32());
        x = x - splat(slope) * abs(at);
      }
      if (terms != nullptr) {
        const F32 term = load(terms + key);
        x = select(term == minus_inf, minus_inf, x + term);
      }
      store(scores + key, x);
    }
  }
};

// Scores of [begin, end) that are not in `seen` become -inf.
inline void hide_outside(float* scores, int64_t begin, int64_t end, KeyRange seen) {
  const F32 lanes = convert_u32(iota_u32()), minus_inf = splat(minus_infinity());
  for (int64_t key = begin; key < end; key += kLanes) {
    if (key >= seen.begin && key + kLanes <= seen.end) continue;
    const F32 from = splat(static_cast<float>(seen.begin - key));
    const F32 to = splat(static_cast<float>(seen.end - key));
    const F32 x = select(to > lanes, load(scores + key), minus_inf);
    store(scores + key, select(lanes >= from, x, minus_inf));
  }
}

}  // namespace lmdecode::LMD_SIMD::attention
