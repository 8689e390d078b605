// The rows of a sampler and its CPU kernels at every level that the machine has: the same bits of
// results and states, and nothing read or written outside of tensors, states and workspace (their
// buffers have no slack, so the sanitizers see it).
#include <cstdlib>
#include <iostream>
#include <memory>

#include "check.h"
#include "sampler_case.h"
#include "sampling/sampler_levels.h"
#include "sampling/sampler_workspace.h"
#include "simd/cpu_capability.h"

namespace lmdecode::sampling::test {
namespace {

struct Level {
  const char* name;
  void (*step)(const SamplerStepParams&, int64_t, int64_t, void*);
  void (*verify)(const SamplerVerifyParams&, int64_t, int64_t, void*);
};

std::vector<Level> levels() {
  std::vector<Level> all{{"default", &default_::sampling::sampler_step_rows,
                          &default_::sampling::sampler_verify_rows}};
#if defined(LMD_HAS_X86_KERNELS)
  const CpuCapability best = max_cpu_capability();
  if (best >= CpuCapability::kAvx2) {
    all.push_back(
        {"avx2", &avx2::sampling::sampler_step_rows, &avx2::sampling::sampler_verify_rows});
  }
  if (best >= CpuCapability::kAvx512) {
    all.push_back(
        {"avx512", &avx512::sampling::sampler_step_rows, &avx512::sampling::sampler_verify_rows});
  }
#endif
  return all;
}

struct Workspace {
  explicit Workspace(const SamplerLayout& layout) {
    SamplerWorkspace unused;
    if (posix_memalign(&memory, 64, split_sampler_workspace(nullptr, layout, &unused)) != 0)
      throw std::bad_alloc();
  }
  Workspace(const Workspace&) = delete;
  ~Workspace() { std::free(memory); }
  void* memory = nullptr;
};

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

StepResult step(const Level& level, const StepCase& c, const Rows& rows) {
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
  const Workspace workspace(rows.layout);
  level.step(p, 0, batch / 2, workspace.memory);
  level.step(p, batch / 2, batch, workspace.memory);
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

DraftResult verify(const Level& level, const DraftCase& c, const Rows& rows) {
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
  const Workspace workspace(rows.layout);
  level.verify(v, 0, batch, workspace.memory);
  r.state = bytes_of(rows);
  return r;
}

// ---- lives of rows

int64_t calls_run = 0;

SamplerLayout layout_with(int64_t vocab, int64_t text) {
  return SamplerLayout::of(vocab, text, kMostRules);
}

// The same call at every level, from the same rows; these have gone on then.
template <class Case, class Result>
bool same_at_all_levels(Result (*run)(const Level&, const Case&, const Rows&), const Case& c,
                        Rows* rows, uint64_t seed) {
  const Rows before = rows->copy(rows->layout);
  const std::vector<Level> all = levels();
  const Result expected = run(all[0], c, *rows);
  ++calls_run;
  for (size_t i = 1; i < all.size(); ++i) {
    const bool equal = run(all[i], c, before.copy(rows->layout)) == expected;
    CHECK(equal);
    if (!equal) std::cout << all[i].name << " of case " << seed << std::endl;
    if (!equal) return false;
  }
  return true;
}

bool rows_are_right(const Rows& rows) {
  bool right = true;
  for (int64_t i = 0; i < rows.batch; ++i) right &= wrong_row(rows.at(i), rows.layout) == nullptr;
  CHECK(right);
  return right;
}

// Accepts and takes back: the row is what it was.
void go_and_come_back(Random& random, const Rows& rows, int64_t row, int64_t most) {
  if (!rows.row(row).active) return;
  const Buffer<char> before = bytes_of(rows);
  SamplerRowView view = rows.view(row);
  for (int64_t i = 0; i < most; ++i) view.accept(random.below(rows.layout.vocab));
  view.rewind(most);
  CHECK(bytes_of(rows) == before);
}

void run_life(uint64_t seed, int64_t vocab, int steps) {
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
      if (!same_at_all_levels(&verify, c, &rows, seed)) return;
    } else {
      const StepCase c(random, batch, vocab);
      if (!same_at_all_levels(&step, c, &rows, seed)) return;
    }
    if (!rows_are_right(rows)) return;
  }
}

void run_lives(uint64_t first_seed, int count, int64_t min_vocab, int64_t max_vocab, int steps) {
  for (int i = 0; i < count; ++i) {
    const uint64_t seed = first_seed + static_cast<uint64_t>(i);
    run_life(seed, min_vocab + static_cast<int64_t>(seed) % (max_vocab - min_vocab + 1), steps);
  }
}

TEST(small_rows) { run_lives(1, 250, 1, 70, 12); }
TEST(rows_about_a_power_of_two) { run_lives(10000, 30, 126, 130, 12); }
TEST(rows_of_1000) { run_lives(20000, 30, 990, 1030, 10); }
TEST(rows_of_20000) { run_lives(30000, 5, 19997, 20011, 6); }
TEST(rows_of_140000) { run_lives(40000, 1, 139990, 140003, 4); }

// Text that comes and goes leaves the table as it was: there is room for ever.
TEST(rewound_texts_take_no_room) {
  constexpr int64_t kVocab = 5000, kText = 16;
  Random random(7);
  const Rows rows(SamplerLayout::of(kVocab, kText, kMostRules), 1);
  RowCase c = random_row(random, kVocab);
  c.integers.keeps_text = 1;
  c.prompt = {1, 2};
  c.rules = {1, 1, 0, 0, 0, 3, 0, 4};
  rows.insert(0, c);
  for (int i = 0; i < 100; ++i) go_and_come_back(random, rows, 0, kText - 2);
  CHECK_EQ(rows.row(0).touched, int64_t{4});
  // One of the rules stays touched, though it came last.
  rows.view(0).accept(4);
  rows.view(0).rewind(1);
  CHECK(rows.view(0).find(4) >= 0);
}

// What wrong_row() takes can be copied, go on and be taken back, whatever it holds.
TEST(damaged_rows) {
  int64_t taken = 0, refused = 0;
  for (uint64_t seed = 1; seed <= 3000; ++seed) {
    Random random(seed + 70000);
    const int64_t vocab = 1 + random.below(200), text = 24;
    const SamplerLayout layout = layout_with(vocab, text);
    const Rows rows(layout, 1);
    RowCase c = random_row(random, vocab);
    rows.insert(0, c);
    SamplerRowView view = rows.view(0);
    for (int64_t i = random.below(8); i > 0; --i) view.accept(random.below(vocab));
    const int64_t many = 1 + random.below(4);
    const int64_t width =
        random.chance(0.6) ? static_cast<int64_t>(sizeof(SamplerRow)) : layout.size;
    for (int64_t i = 0; i < many; ++i) {
      if (random.chance(0.3)) {  // a number of its fields
        const int64_t at = random.below(static_cast<int64_t>(sizeof(SamplerRow)) / 8) * 8;
        const int64_t value = random.any_of<int64_t>({0, 1, -1, 2, 16, 24, INT64_MAX, INT64_MIN});
        std::memcpy(rows.at(0) + at, &value, 8);
      } else {
        rows.at(0)[random.below(width)] = static_cast<char>(random.below(256));
      }
    }
    if (wrong_row(rows.at(0), layout) != nullptr) {
      ++refused;
      continue;
    }
    ++taken;
    const Rows copy = rows.copy(layout);
    if (!copy.row(0).active) continue;
    for (int i = 0; i < 3; ++i) {
      if (copy.row(0).integers.keeps_text != 0 && copy.row(0).length >= text) break;
      const StepCase step_case(random, 1, vocab);
      step(levels().back(), step_case, copy);
      copy.view(0).rewind(random.below(std::min<int64_t>(copy.row(0).output_length, 3) + 1));
    }
    if (copy.row(0).integers.keeps_text == 0) continue;
    copy.view(0).rewind(copy.row(0).output_length);
    while (copy.view(0).has_room()) copy.view(0).accept(random.below(vocab));
    StepCase looks(random, 1, vocab);
    looks.accept = false;
    step(levels().front(), looks, copy);
  }
  std::cout << taken << " damaged rows taken, " << refused << " refused" << std::endl;
  CHECK(check::filtered || (taken > 300 && refused > 300));
}

TEST(more_than_3000_calls) {
  std::cout << calls_run << " calls up to level " << cpu_capability_name(max_cpu_capability())
            << std::endl;
  CHECK(check::filtered || calls_run > 3000);
}

}  // namespace
}  // namespace lmdecode::sampling::test

CHECK_MAIN()
