// A set of token sequences as a trie, which restricts the next tokens of a search to them.
//
// Nodes are numbered in the order of their depth, the children of a node next to each other and
// ascending by their tokens: node n has the children [child_begin[n], child_begin[n + 1]), and
// tokens[n] is the token that leads to it. Node 0 is the root, where nothing is generated yet.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace lmdecode::beam {

constexpr int32_t kOffTrie = -1;  // the node of a sequence that no item begins with

// The place of a token among `size` ascending ones, or -1.
LMD_HOST_DEVICE int64_t place_of(const int32_t* tokens, int64_t size, int64_t token) {
  int64_t low = 0, high = size;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (tokens[middle] < token) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < size && tokens[low] == token ? low : -1;
}

struct TokenTrie {
  const int32_t* tokens = nullptr;       // [nodes]; null: no trie
  const int32_t* child_begin = nullptr;  // [nodes + 1]
  int64_t nodes = 0;

  struct Children {
    int64_t begin, end;
  };
  // Always nodes of the trie, even if the arrays are invalid.
  LMD_HOST_DEVICE Children children(int64_t node) const {
    if (node < 0 || node >= nodes) return {0, 0};
    const int64_t begin = child_begin[node], end = child_begin[node + 1];
    return begin < 1 || end > nodes || end < begin ? Children{0, 0} : Children{begin, end};
  }

  // The node that a token leads to, or kOffTrie.
  LMD_HOST_DEVICE int32_t child(int64_t node, int64_t token) const {
    const Children all = children(node);
    const int64_t place = place_of(tokens + all.begin, all.end - all.begin, token);
    return place < 0 ? kOffTrie : static_cast<int32_t>(all.begin + place);
  }

  // The node of a sequence, from the root on.
  LMD_HOST_DEVICE int32_t find(const int64_t* sequence, int64_t size) const {
    int32_t node = 0;
    for (int64_t i = 0; i < size && node != kOffTrie; ++i) node = child(node, sequence[i]);
    return node;
  }
};

}  // namespace lmdecode::beam
