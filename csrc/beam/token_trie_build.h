// From sequences to a TokenTrie, on the calling thread.
#pragma once

#include <cstdint>
#include <vector>

namespace lmdecode::beam {

constexpr int64_t kMaxTrieNodes = INT32_MAX;

struct TokenTrieArrays {
  std::vector<int32_t> tokens;       // [nodes], -1 for the root
  std::vector<int32_t> child_begin;  // [nodes + 1]
  std::vector<uint8_t> ends;         // [nodes]: 1 where a sequence ends
};

// Sequence i is tokens[offsets[i] .. offsets[i + 1]); tokens are 0 to 2^31 - 1, and there are fewer
// than 2^32 sequences. Equal ones are one. Throws std::invalid_argument for more than
// kMaxTrieNodes.
TokenTrieArrays build_token_trie(const int64_t* tokens, const int64_t* offsets, int64_t sequences);

}  // namespace lmdecode::beam
