// Random calls of a sampler's step and of its verification of drafts, and the lives of its rows.
#pragma once

#include <sstream>

#include "check.h"
#include "sampler_case.h"
#include "sampling/sampler_verify.h"

namespace lmdecode::sampling::test {

// ---- steps

struct Logits {
  Buffer<unsigned char> memory;
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t row_stride = 0, vocab_stride = 1;

  Logits(Random& random, int64_t rows, int64_t vocab) {
    const std::string kind =
        random.any_of({"normal", "normal", "flat", "peaked", "ties", "equal", "zeros", "masked",
                       "infinite", "nan", "none", "huge", "tiny", "neighbours"});
    dtype = random.any_of({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
    vocab_stride = random.chance(0.8) ? 1 : random.below(4);
    const int64_t span = (vocab - 1) * vocab_stride + 1;
    row_stride = random.chance(0.1) ? 0 : span + random.below(3);
    const int64_t offset = random.below(5);
    const int64_t elements = offset + (rows - 1) * row_stride + span;
    const int64_t width = dtype == DType::kFloat32 ? 4 : 2;
    memory = Buffer<unsigned char>(elements * width);
    for (int64_t i = 0; i < elements; ++i) {
      const float value = random_logit(random, kind, i % vocab, vocab);
      uint16_t half;
      if (width == 2) round_to(dtype, value, &half);
      std::memcpy(memory.data() + i * width,
                  width == 4 ? static_cast<const void*>(&value) : static_cast<const void*>(&half),
                  static_cast<size_t>(width));
    }
    data = memory.data() + offset * width;
  }
};

// Random calls of a step: its inputs, and outputs of exactly their sizes.
struct StepCase {
  Logits logits;
  Buffer<int32_t> bitmask;
  bool accept, raw, counts, kept_logits, kept_set;
  int64_t num_logprobs;

  StepCase(Random& random, int64_t rows, int64_t vocab) : logits(random, rows, vocab) {
    const int64_t words = (vocab + 31) / 32;
    if (random.chance(0.3)) bitmask = Buffer<int32_t>(rows * words);
    const bool nothing = random.chance(0.1);
    for (int64_t i = 0; i < bitmask.size(); ++i) {
      bitmask[i] = nothing ? 0 : static_cast<int32_t>(random.below(int64_t{1} << 32));
    }
    accept = random.chance(0.9);
    raw = random.chance(0.5);
    counts = random.chance(0.2);
    kept_logits = random.chance(0.3);
    kept_set = random.chance(0.3);
    num_logprobs =
        random.chance(0.5) ? -1 : std::min<int64_t>(vocab, random.any_of<int64_t>({0, 1, 5, 64}));
  }

  SamplerStepParams params(const Rows& rows) const {
    SamplerStepParams p;
    p.batch = rows.batch;
    p.vocab = rows.layout.vocab;
    p.state = rows.memory.data();
    p.layout = rows.layout;
    p.logits = logits.data;
    p.dtype = logits.dtype;
    p.logits_row_stride = logits.row_stride;
    p.logits_vocab_stride = logits.vocab_stride;
    p.bitmask = bitmask.size() > 0 ? bitmask.data() : nullptr;
    p.bitmask_row_stride = (p.vocab + 31) / 32;
    p.accept = accept;
    return p;
  }
};

struct StepResult {
  Buffer<int64_t> index, rank, top_ids, kept_ids;
  Buffer<float> logprob, top_logprobs, kept_logits, kept_logprobs;
  Buffer<int32_t> kept_count, stage_counts;
  Buffer<uint8_t> status;
  Buffer<char> state;
  bool operator==(const StepResult&) const = default;
};

// run(params) runs the call.
template <class Run>
StepResult step(const Run& run, const StepCase& c, const Rows& rows) {
  const int64_t batch = rows.batch, vocab = rows.layout.vocab;
  const int64_t best = std::max<int64_t>(c.num_logprobs, 0);
  StepResult r;
  SamplerStepParams p = c.params(rows);
  p.raw_log_probs = c.raw;
  p.num_logprobs = c.num_logprobs;
  const auto take = [](auto& buffer, int64_t size) {
    buffer = std::remove_reference_t<decltype(buffer)>(size);
    return buffer.data();
  };
  p.index = take(r.index, batch);
  p.kept_count = take(r.kept_count, batch);
  p.status = take(r.status, batch);
  if (c.num_logprobs >= 0) {
    p.rank = take(r.rank, batch);
    p.logprob = take(r.logprob, batch);
    p.top_ids = take(r.top_ids, batch * best);
    p.top_logprobs = take(r.top_logprobs, batch * best);
  }
  if (c.counts) p.stage_counts = take(r.stage_counts, batch * kSamplerStages);
  if (c.kept_logits) p.kept_logits = take(r.kept_logits, batch * vocab);
  if (c.kept_set) {
    p.kept_ids = take(r.kept_ids, batch * vocab);
    p.kept_logprobs = take(r.kept_logprobs, batch * vocab);
  }
  run(p);
  r.state = bytes_of(rows);
  return r;
}

// Drafts: of a chain or a tree, with or without the logits that they come from.
struct DraftCase {
  StepCase step;
  int64_t drafts;
  bool rejection;
  Buffer<int64_t> draft, parents, num_draft;
  Buffer<float> draft_logits;

  DraftCase(Random& random, int64_t batch, int64_t vocab, int64_t count)
      : step(random, batch * (count + 1), vocab), drafts(count), draft(batch * count) {
    rejection = random.chance(0.5);
    for (int64_t i = 0; i < batch * drafts; ++i) {
      draft[i] = random.chance(0.1) ? random.any_of<int64_t>({-1, vocab, int64_t{1} << 62})
                                    : random.below(std::min<int64_t>(vocab, 4));
    }
    if (!rejection && random.chance(0.5)) {
      parents = Buffer<int64_t>(batch * drafts);
      for (int64_t i = 0; i < batch * drafts; ++i) parents[i] = random.below(i % drafts + 1) - 1;
    }
    if (random.chance(0.5)) {
      num_draft = Buffer<int64_t>(batch);
      for (int64_t i = 0; i < batch; ++i) num_draft[i] = random.below(drafts + 1);
    }
    if (rejection && random.chance(0.6)) {
      draft_logits = Buffer<float>(batch * drafts * vocab);
      const std::string kind = random.any_of({"normal", "ties", "infinite", "nan", "none", "huge"});
      for (int64_t i = 0; i < draft_logits.size(); ++i) {
        draft_logits[i] = random_logit(random, kind, i % vocab, vocab);
      }
    }
  }
};

struct DraftResult {
  Buffer<int64_t> tokens, path, num_accepted;
  Buffer<uint8_t> status;
  Buffer<char> state;
  bool operator==(const DraftResult&) const = default;
};

template <class Run>
DraftResult verify(const Run& run, const DraftCase& c, const Rows& rows) {
  const int64_t batch = rows.batch, rows_each = c.drafts + 1;
  DraftResult r;
  Buffer<int64_t> index(batch);
  Buffer<int32_t> kept_count(batch);
  r.tokens = Buffer<int64_t>(batch * rows_each);
  r.path = Buffer<int64_t>(batch * c.drafts);
  r.num_accepted = Buffer<int64_t>(batch);
  r.status = Buffer<uint8_t>(batch);
  SamplerVerifyParams v;
  v.step = c.step.params(rows);
  v.step.accept = true;
  v.logits_draft_stride = v.step.logits_row_stride;
  v.step.logits_row_stride *= rows_each;
  v.bitmask_draft_stride = v.step.bitmask_row_stride;
  v.step.bitmask_row_stride *= rows_each;
  v.step.index = index.data();
  v.step.kept_count = kept_count.data();
  v.step.status = r.status.data();
  v.drafts = c.drafts;
  v.draft = c.draft.data();
  v.parents = c.parents.size() > 0 ? c.parents.data() : nullptr;
  v.num_draft = c.num_draft.size() > 0 ? c.num_draft.data() : nullptr;
  v.draft_logits = c.draft_logits.size() > 0 ? c.draft_logits.data() : nullptr;
  v.rejection = c.rejection;
  v.tokens = r.tokens.data();
  v.path = r.path.data();
  v.num_accepted = r.num_accepted.data();
  run(v);
  r.state = bytes_of(rows);
  return r;
}

// ---- where two results differ, for a message

template <class T>
void compare(const char* name, const Buffer<T>& a, const Buffer<T>& b, std::ostream& text) {
  for (int64_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(&a[i], &b[i], sizeof(T)) == 0) continue;
    text << "\n  " << name << "[" << i << "] " << +a[i] << " and " << +b[i];
    return;
  }
}

inline std::string difference(const StepResult& a, const StepResult& b) {
  std::ostringstream text;
  compare("index", a.index, b.index, text);
  compare("kept_count", a.kept_count, b.kept_count, text);
  compare("stage_counts", a.stage_counts, b.stage_counts, text);
  compare("status", a.status, b.status, text);
  compare("rank", a.rank, b.rank, text);
  compare("logprob", a.logprob, b.logprob, text);
  compare("top_ids", a.top_ids, b.top_ids, text);
  compare("top_logprobs", a.top_logprobs, b.top_logprobs, text);
  compare("kept_logits", a.kept_logits, b.kept_logits, text);
  compare("kept_ids", a.kept_ids, b.kept_ids, text);
  compare("kept_logprobs", a.kept_logprobs, b.kept_logprobs, text);
  compare("state", a.state, b.state, text);
  return text.str();
}

inline std::string difference(const DraftResult& a, const DraftResult& b) {
  std::ostringstream text;
  compare("tokens", a.tokens, b.tokens, text);
  compare("path", a.path, b.path, text);
  compare("num_accepted", a.num_accepted, b.num_accepted, text);
  compare("status", a.status, b.status, text);
  compare("state", a.state, b.state, text);
  return text.str();
}

// ---- lives of rows

inline SamplerLayout layout_with(int64_t vocab, int64_t text) {
  return SamplerLayout::of(vocab, text, kMostRules);
}

inline bool rows_are_right(const Rows& rows) {
  bool right = true;
  for (int64_t i = 0; i < rows.batch; ++i) right &= wrong_row(rows.at(i), rows.layout) == nullptr;
  CHECK(right);
  return right;
}

// Accepts and takes back: the row is what it was.
inline void go_and_come_back(Random& random, const Rows& rows, int64_t row, int64_t most) {
  if (!rows.row(row).active) return;
  const Buffer<char> before = bytes_of(rows);
  SamplerRowView view = rows.view(row);
  for (int64_t i = 0; i < most; ++i) view.accept(random.below(rows.layout.vocab));
  view.rewind(most);
  CHECK(bytes_of(rows) == before);
}

// same(case, &rows, seed) makes a call with the rows, which go on, and compares.
template <class Same>
void run_life(uint64_t seed, int64_t vocab, int steps, const Same& same) {
  Random random(seed);
  const int64_t batch = 1 + random.below(3);
  Rows rows(layout_with(vocab, 16), batch);
  for (int64_t row = 0; row < batch; ++row) rows.insert(row, random_row(random, vocab));
  for (int i = 0; i < steps; ++i) {
    const int64_t drafts = 1 + random.below(4);
    int64_t longest = 0;
    for (int64_t row = 0; row < batch; ++row)
      longest = std::max(longest, rows.row(row).active ? rows.row(row).length : 0);
    if (longest + drafts + 1 > rows.layout.text_capacity) {
      rows = rows.copy(layout_with(vocab, longest + drafts + 1));
    }
    const int64_t row = random.below(batch);
    if (random.chance(0.1)) rows.view(row).row->active = 0;
    if (random.chance(0.1)) rows.insert(row, random_row(random, vocab));
    go_and_come_back(random, rows, row, drafts);
    if (rows.row(row).active && random.chance(0.2)) {
      rows.view(row).rewind(random.below(rows.row(row).output_length + 1));
    }
    if (random.chance(0.3)) {
      const DraftCase c(random, batch, vocab, drafts);
      if (!same(c, &rows, seed)) return;
    } else {
      const StepCase c(random, batch, vocab);
      if (!same(c, &rows, seed)) return;
    }
    if (!rows_are_right(rows)) return;
  }
}

}  // namespace lmdecode::sampling::test
