// Sequences to tiles, tiles to threads.
#include <algorithm>
#include <atomic>
#include <vector>

#include "attention/attention_tuning.h"
#include "attention/attention_workspace.h"
#include "attention/sliding_window_attention.h"
#include "common/parallel.h"
#include "common/parallel_rows.h"

namespace lmdecode::attention {

namespace {

using namespace tuning;

// ---- a window in a full mask

struct MaskWindow {
  bool found = false;
  int64_t window = kUnlimited;
  int64_t window_right = kUnlimited;
};

// How the elements of a mask are read.
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

// The window that hides exactly the keys that the mask hides, where the last query has the position
// of the last key. One pass over the whole mask, on torch's threads, which ends early if there is
// no window. A few rows do not suffice: packed documents have the same ones. A mask that adds
// anything but zero to the score of a visible key is not a window.
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

// ---- work of threads

// Tiles, and what the tiles before each one cost.
struct WorkList {
  std::vector<AttentionTile> tiles;
  std::vector<int64_t> cost = {0};
};

int64_t tile_cost(const SlidingWindowAttentionParams& p, const AttentionTile& tile) {
  const auto keys = [&](int64_t token) {
    const KeyRange seen = p.keys_seen(tile.sequence, token);
    return seen.end - seen.begin;
  };
  const int64_t last = tile.first_token + tile.tokens - 1;
  // One more key stands for the fixed cost of a row.
  return tile.tokens * p.group() * (1 + (keys(tile.first_token) + keys(last)) / 2);
}

// Tokens of a tile: rows for one packing of the keys, but enough tiles for the threads.
int64_t tokens_of_a_tile(const SlidingWindowAttentionParams& p, bool by_matrix) {
  int64_t queries = 0;
  for (int64_t sequence = 0; sequence < p.sequences; ++sequence) {
    queries += p.queries_of(sequence);
  }
  const int64_t most = by_matrix ? kMatrixPackingRows : kTileRows;
  int64_t rows = most;
  const int64_t threads = num_threads();
  if (threads > 1) {
    const int64_t rows_a_thread = queries * p.q_heads / threads;
    const int64_t least =
        by_matrix ? std::clamp(rows_a_thread, kMinTileRows, kMatrixMinRows) : kMinTileRows;
    rows = std::clamp(rows_a_thread / kTilesOfAThread, least, most);
  }
  return std::max<int64_t>(1, rows / p.group());
}

WorkList work_list(const SlidingWindowAttentionParams& p, bool by_matrix) {
  const int64_t tokens = tokens_of_a_tile(p, by_matrix);
  WorkList list;
  for (int64_t sequence = 0; sequence < p.sequences; ++sequence) {
    const int64_t queries = p.queries_of(sequence);
    for (int64_t head = 0; head < p.kv_heads; ++head) {
      for (int64_t first = 0; first < queries; first += tokens) {
        list.tiles.push_back({sequence, head, first, std::min(tokens, queries - first)});
        list.cost.push_back(list.cost.back() + tile_cost(p, list.tiles.back()));
      }
    }
  }
  return list;
}

}  // namespace

void sliding_window_attention_cpu(const SlidingWindowAttentionParams& given) {
  const bool is_bfloat16 = given.dtype == DType::kBFloat16;
  const auto by_vectors = is_bfloat16
                              ? LMD_SELECT_BF16_KERNEL(attention, sliding_window_attention_tiles)
                              : LMD_SELECT_KERNEL(attention, sliding_window_attention_tiles);
  const auto run =
      is_bfloat16 || given.may_round_to_bfloat16
          ? LMD_SELECT_AMX_KERNEL(attention, sliding_window_attention_tiles, by_vectors)
          : by_vectors;
  const bool by_matrix = run != by_vectors;
  SlidingWindowAttentionParams params = given;
  if (params.mask_type != MaskType::kNone && params.q_positions == nullptr &&
      params.kv_lengths == nullptr) {
    const MaskWindow found = find_mask_window(params);
    if (found.found) {
      params.mask_type = MaskType::kNone;
      params.window = found.window;
      params.window_right = found.window_right;
    }
  }
  const WorkList list = work_list(params, by_matrix);
  if (list.tiles.empty()) return;
  int64_t most_rows = 0;
  for (const AttentionTile& tile : list.tiles) {
    most_rows = std::max(most_rows, tile.tokens * params.group());
  }
  const double product_nanoseconds =
      kNanosecondsPerProduct * static_cast<double>(params.head_size + params.value_size);
  const size_t bytes =
      by_matrix ? matrix_attention_bytes(most_rows, params.head_size, params.value_size)
                : attention_workspace_bytes(most_rows, params.head_size, params.value_size);
  // A part of the cost is the tiles that begin in it.
  parallel_rows(
      "sliding_window_attention", list.cost.back(), product_nanoseconds, bytes,
      [&](int64_t begin, int64_t end, void* memory) {
        const auto tile_from = [&](int64_t cost) {
          return std::lower_bound(list.cost.begin(), list.cost.end() - 1, cost) - list.cost.begin();
        };
        run(params, list.tiles.data(), tile_from(begin), tile_from(end), most_rows, memory);
      });
}

}  // namespace lmdecode::attention
