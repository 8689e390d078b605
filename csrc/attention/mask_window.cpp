#include "attention/mask_window.h"

#include <atomic>

#include "common/parallel.h"

namespace lmdecode::attention {
namespace {

// What one element says.
struct BoolMask {
  using Element = bool;
  bool true_is_visible;
  bool is_visible(bool value) const { return value == true_is_visible; }
  bool is_hidden(bool value) const { return value != true_is_visible; }
};

template <class T>
struct AdditiveMask {
  using Element = T;
  bool is_visible(T value) const { return to_float(value) == 0.0f; }
  bool is_hidden(T value) const { return !(to_float(value) > kMaskedScore); }
};

// Elements [begin, end) of a row all have a property.
template <class T, class Property>
bool all_have(const T* row, int64_t stride, int64_t begin, int64_t end, const Property& property) {
  bool all = true;  // without early exits, which compilers do not vectorise
  if (stride == 1) {
    for (int64_t i = begin; i < end; ++i) all &= property(row[i]);
  } else {
    for (int64_t i = begin; i < end; ++i) all &= property(row[i * stride]);
  }
  return all;
}

template <class Mask>
MaskWindow find_window(const SlidingWindowAttentionParams& p, const Mask& mask) {
  using Element = typename Mask::Element;
  const AttentionStrides& s = p.mask_strides;
  const auto row = [&](int64_t sequence, int64_t head, int64_t token) {
    return static_cast<const Element*>(p.mask) + sequence * s.sequence + head * s.head +
           token * s.token;
  };
  const int64_t keys = p.kv_len, queries = p.q_len;
  MaskWindow found;
  if (keys == 0 || queries == 0) return found;
  // The last row tells the window, the first that stands beside a key what lies to its right.
  const Element* last = row(0, 0, queries - 1);
  int64_t begin = 0;
  while (begin < keys && !mask.is_visible(last[begin * s.element])) ++begin;
  if (begin == keys) return found;
  if (begin > 0) found.window = keys - begin;
  const int64_t token = max_of(0, queries - keys);
  const Element* first = row(0, 0, token);
  int64_t end = keys;
  while (end > 0 && !mask.is_visible(first[(end - 1) * s.element])) --end;
  const int64_t right = end - 1 - aligned_position(token, queries, keys);
  if (end < keys) {
    if (right < 0) return found;
    found.window_right = right;
  }
  const int64_t sequences = s.sequence == 0 ? 1 : p.sequences, heads = s.head == 0 ? 1 : p.q_heads;
  std::atomic<bool> same = true;
  constexpr int64_t kElementsOfATask = 1 << 18;
  parallel_for(sequences * heads * queries, 1 + kElementsOfATask / keys,
               [&](int64_t from, int64_t to) {
                 for (int64_t i = from; i < to && same.load(std::memory_order_relaxed); ++i) {
                   const int64_t query = i % queries, head = i / queries % heads;
                   const Element* at = row(i / queries / heads, head, query);
                   const KeyRange seen = visible_keys(aligned_position(query, queries, keys),
                                                      found.window, found.window_right, keys);
                   const auto hidden = [&](Element value) { return mask.is_hidden(value); };
                   const auto visible = [&](Element value) { return mask.is_visible(value); };
                   if (!all_have(at, s.element, 0, seen.begin, hidden) ||
                       !all_have(at, s.element, seen.begin, seen.end, visible) ||
                       !all_have(at, s.element, seen.end, keys, hidden)) {
                     same = false;
                   }
                 }
               });
  found.found = same;
  return found;
}

}  // namespace

MaskWindow find_mask_window(const SlidingWindowAttentionParams& params) {
  switch (params.mask_type) {
    case MaskType::kBool:
      return find_window(params, BoolMask{params.mask_true_is_visible});
    case MaskType::kFloat32:
      return find_window(params, AdditiveMask<float>{});
    case MaskType::kFloat16:
      return find_window(params, AdditiveMask<Half>{});
    case MaskType::kBFloat16:
      return find_window(params, AdditiveMask<BFloat16>{});
    case MaskType::kNone:
      break;
  }
  return {};
}

}  // namespace lmdecode::attention
