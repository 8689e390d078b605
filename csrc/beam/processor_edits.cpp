#include "beam/processor_edits.h"

namespace lmdecode::beam {
namespace {

int64_t capacity(int64_t max_edits, int64_t vocab) { return max_edits < vocab ? max_edits : vocab; }

// The table is at most half full.
int slot_bits(int64_t edits) {
  int bits = 4;
  while ((int64_t{1} << bits) < 2 * edits) ++bits;
  return bits;
}

}  // namespace

size_t TokenEdits::bytes(int64_t max_edits, int64_t vocab) {
  const int64_t edits = capacity(max_edits, vocab);
  const size_t slots = size_t{1} << slot_bits(edits);
  return static_cast<size_t>(edits) * sizeof(TokenEdit) + slots * sizeof(uint32_t);
}

TokenEdits::TokenEdits(void* memory, int64_t max_edits, int64_t vocab)
    : vocab_(vocab),
      edits_(static_cast<TokenEdit*>(memory)),
      slots_(reinterpret_cast<uint32_t*>(edits_ + capacity(max_edits, vocab))) {}

TokenEdit* TokenEdits::edit(int64_t token) {
  if (token < 0 || token >= vocab_) return nullptr;
  const uint32_t slot = slot_of(static_cast<uint32_t>(token));
  if (slots_[slot] == kFree) {
    slots_[slot] = static_cast<uint32_t>(size_);
    edits_[size_++] = {static_cast<uint32_t>(token), 0, false, false, false, 0.0f, 0.0f};
  }
  return &edits_[slots_[slot]];
}

void TokenEdits::collect(const RowProcessors& row) {
  size_ = 0;
  // As large as this row needs: a row's table is cleared before it is filled.
  const int64_t most = row.history.size + row.end_tokens.size + row.suppressed_tokens.size +
                       row.diversity_tokens.size;
  slot_bits_ = slot_bits(capacity(most, vocab_));
  for (uint32_t slot = 0; slot < uint32_t{1} << slot_bits_; ++slot) slots_[slot] = kFree;

  for (int64_t i = 0; i < row.diversity_tokens.size; ++i) {
    if (TokenEdit* e = edit(row.diversity_tokens[i])) ++e->occurrences;
  }
  if (row.penalizes_repetition()) {
    for (int64_t i = 0; i < row.history.size; ++i) {
      if (TokenEdit* e = edit(row.history[i])) e->repeated = true;
    }
  }
  const auto ban = [this](int64_t token) {
    if (TokenEdit* e = edit(token)) e->banned = true;
  };
  if (row.ngram > 0) {
    for (int64_t start = 0; start + row.ngram <= row.history.size; ++start) {
      if (row.repeats_ngram(start)) ban(row.history[start + row.ngram - 1]);
    }
  }
  for (int64_t i = 0; i < row.end_tokens.size; ++i) ban(row.end_tokens[i]);
  for (int64_t i = 0; i < row.suppressed_tokens.size; ++i) ban(row.suppressed_tokens[i]);
}

}  // namespace lmdecode::beam
