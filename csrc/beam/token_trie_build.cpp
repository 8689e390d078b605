#include "beam/token_trie_build.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace lmdecode::beam {

// Level after level: `keys` has the sequences in the order of the nodes that they have come to, and
// a node's part of it is sorted by the next token alone.
TokenTrieArrays build_token_trie(const int64_t* tokens, const int64_t* offsets, int64_t sequences) {
  struct Range {
    uint32_t begin, end;
  };
  std::vector<uint64_t> keys(static_cast<size_t>(sequences));  // token << 32 | sequence
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  std::vector<Range> level{{0, static_cast<uint32_t>(sequences)}}, next;
  TokenTrieArrays trie;
  trie.tokens.push_back(-1);
  trie.ends.push_back(0);
  for (int64_t depth = 0; !level.empty(); ++depth) {
    next.clear();
    // The nodes of this level are the last that there are.
    size_t node = trie.tokens.size() - level.size();
    for (const Range& range : level) {
      const auto first = keys.begin() + range.begin;
      auto last = first;
      for (auto key = first; key != keys.begin() + range.end; ++key) {
        const uint64_t sequence = static_cast<uint32_t>(*key);
        const int64_t at = offsets[sequence] + depth;
        if (at == offsets[sequence + 1]) {
          trie.ends[node] = 1;
        } else {
          *last++ = static_cast<uint64_t>(tokens[at]) << 32 | sequence;
        }
      }
      std::sort(first, last);
      trie.child_begin.push_back(static_cast<int32_t>(trie.tokens.size()));
      for (auto begin = first; begin != last;) {
        const uint64_t token = *begin >> 32;
        auto end = begin;
        while (end != last && *end >> 32 == token) ++end;
        if (static_cast<int64_t>(trie.tokens.size()) == kMaxTrieNodes) {
          throw std::invalid_argument("Trie: sequences make more than " +
                                      std::to_string(kMaxTrieNodes) + " nodes; expected fewer");
        }
        trie.tokens.push_back(static_cast<int32_t>(token));
        trie.ends.push_back(0);
        next.push_back({static_cast<uint32_t>(begin - keys.begin()),
                        static_cast<uint32_t>(end - keys.begin())});
        begin = end;
      }
      ++node;
    }
    level.swap(next);
  }
  trie.child_begin.push_back(static_cast<int32_t>(trie.tokens.size()));
  return trie;
}

}  // namespace lmdecode::beam
