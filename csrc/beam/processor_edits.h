// The tokens of a row that processors change one by one, each once, with their values: on the CPU.
// A bias or a bitmask, which acts on all tokens, is no edit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "beam/logits_processors.h"

namespace lmdecode::beam {

struct TokenEdit {
  uint32_t token;
  uint32_t occurrences;  // in the row's diversity_tokens
  bool repeated;         // its repetition is penalized
  bool banned;
  bool listed;     // for the kernel: found among the best of the row
  float logit;     // likewise: the row's own
  float log_prob;  // likewise: after the processors, -inf if banned
};

// A hash table of the edits by token, in memory of the caller. The functions that kernels call are
// always inlined: see simd/vec.h.
class TokenEdits {
 public:
  // For at most max_edits of a vocabulary.
  static size_t bytes(int64_t max_edits, int64_t vocab);

  // memory: bytes(), aligned to 16.
  TokenEdits(void* memory, int64_t max_edits, int64_t vocab);

  // The edits of a row, in any order. The suppressed tokens are banned, be one forced or not.
  void collect(const RowProcessors& row);

  LMD_HOST_DEVICE int64_t size() const { return size_; }
  LMD_HOST_DEVICE TokenEdit& operator[](int64_t i) { return edits_[i]; }

  // The edit of a token, or null.
  LMD_HOST_DEVICE TokenEdit* find(uint32_t token) {
    const uint32_t at = slots_[slot_of(token)];
    return at == kFree ? nullptr : &edits_[at];
  }

 private:
  static constexpr uint32_t kFree = 0xffffffffu;

  // Where the token is, or would be put. The table is at most half full.
  LMD_HOST_DEVICE uint32_t slot_of(uint32_t token) const {
    uint32_t slot = (token * 0x9e3779b1u) >> (32 - slot_bits_);
    while (slots_[slot] != kFree && edits_[slots_[slot]].token != token)
      slot = (slot + 1) & ((uint32_t{1} << slot_bits_) - 1);
    return slot;
  }

  // The edit of a token, added if missing; null for a number that is no token.
  TokenEdit* edit(int64_t token);

  const int64_t vocab_;
  TokenEdit* edits_;
  uint32_t* slots_;  // [2^slot_bits_] numbers of edits
  int slot_bits_ = 1;
  int64_t size_ = 0;
};

}  // namespace lmdecode::beam
