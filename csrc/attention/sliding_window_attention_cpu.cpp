// Sequences to tiles, tiles to threads.
#include <algorithm>
#include <vector>

#include "attention/attention_tuning.h"
#include "attention/attention_workspace.h"
#include "attention/mask_window.h"
#include "attention/sliding_window_attention.h"
#include "common/parallel_rows.h"

namespace lmdecode::attention {

namespace {

using namespace tuning;

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
  // One more key stands for what is done whatever a row sees.
  return tile.tokens * p.group() * (1 + (keys(tile.first_token) + keys(last)) / 2);
}

// Tokens of a tile: rows for one packing of the keys, but enough tiles for the threads.
int64_t tokens_of_a_tile(const SlidingWindowAttentionParams& p) {
  int64_t queries = 0;
  for (int64_t sequence = 0; sequence < p.sequences; ++sequence) {
    queries += p.queries_of(sequence);
  }
  int64_t rows = kTileRows;
  const int64_t threads = num_threads();
  if (threads > 1) {
    const int64_t rows_a_thread = queries * p.q_heads / threads / kTilesOfAThread;
    rows = std::clamp(rows_a_thread, kMinTileRows, kTileRows);
  }
  return std::max<int64_t>(1, rows / p.group());
}

WorkList work_list(const SlidingWindowAttentionParams& p) {
  const int64_t tokens = tokens_of_a_tile(p);
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
  const WorkList list = work_list(params);
  if (list.tiles.empty()) return;
  int64_t most_rows = 0;
  for (const AttentionTile& tile : list.tiles) {
    most_rows = std::max(most_rows, tile.tokens * params.group());
  }
  const double product_nanoseconds =
      kNanosecondsPerProduct * static_cast<double>(params.head_size + params.value_size);
  const size_t bytes = attention_workspace_bytes(most_rows, params.head_size, params.value_size);
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
