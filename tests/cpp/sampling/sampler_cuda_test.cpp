// The emulated CUDA kernels of a sampler against the CPU's bits of results and states.
#include <iostream>

#include "check.h"
#include "emulated_sampler.h"

namespace lmdecode::sampling::test {
namespace {

int64_t calls_run = 0;

// From the same rows; these have gone on then.
template <class Case>
bool same_as_cpu(Random& random, const Case& c, Rows* rows, uint64_t seed, uint64_t schedule) {
  const Rows copy = rows->copy(rows->layout);
  const auto expected = call(OnCpu(rows->layout), c, *rows);
  ++calls_run;
  const unsigned blocks = 1 + static_cast<unsigned>(random.below(rows->batch));
  const Emulated emulated{random.any_of({32u, 64u, 128u}), blocks, schedule};
  std::string what = "another result";
  try {
    const auto result = call(emulated, c, copy);
    if (result == expected) return true;
    what = difference(expected, result);
  } catch (const std::exception& error) {
    what = error.what();
  }
  std::cout << "case " << seed << " threads " << emulated.threads << " blocks " << blocks
            << " schedule " << schedule << " vocab " << rows->layout.vocab << ": " << what
            << std::endl;
  CHECK(false);
  return false;
}

void run_lives(uint64_t first_seed, int count, int64_t min_vocab, int64_t max_vocab, int steps) {
  for (int i = 0; i < count; ++i) {
    const uint64_t seed = first_seed + static_cast<uint64_t>(i);
    const int64_t vocab = min_vocab + static_cast<int64_t>(seed) % (max_vocab - min_vocab + 1);
    Random random(seed * 7919 + 1);
    run_life(seed, vocab, steps, [&](const auto& c, Rows* rows, uint64_t s) {
      return same_as_cpu(random, c, rows, s, random.below(6));
    });
  }
}

TEST(small_rows) { run_lives(1, 120, 1, 70, 8); }
TEST(rows_about_a_power_of_two) { run_lives(10000, 20, 126, 130, 6); }
TEST(rows_of_1000) { run_lives(20000, 12, 990, 1030, 5); }
TEST(rows_of_5000) { run_lives(30000, 3, 4990, 5010, 3); }

// No filter, no penalty.
RowCase plain_row() {
  RowCase row;
  SamplerNumbers& n = row.numbers;
  n.temperature = n.top_p = n.typical_p = n.top_h = n.repetition_penalty = 1.0;
  n.adaptive_target = -1.0;
  row.integers.seed = 5;
  return row;
}

// Different logits that come to the same value, of which top-k keeps the first tokens.
TEST(ties_that_a_temperature_makes) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    Random random(seed);
    constexpr int64_t kVocab = 60;
    Rows rows(layout_with(kVocab, 16), 2);
    for (int64_t row = 0; row < 2; ++row) {
      RowCase c = plain_row();
      c.integers.dialect = random.any_of<int64_t>({0, 3});
      c.numbers.temperature = static_cast<double>(4.815e-4f);
      c.integers.top_k = 2 + random.below(5);
      rows.insert(row, c);
    }
    StepCase c(random, 2, kVocab);
    if (c.logits.dtype != DType::kFloat32) continue;
    c.kept_set = true;
    float* const logits = reinterpret_cast<float*>(c.logits.memory.data());
    for (int64_t i = 0; i < c.logits.memory.size() / 4; ++i) {
      logits[i] = float_of(bits_of(0.00195f) + static_cast<uint32_t>(random.below(4)));
    }
    if (!same_as_cpu(random, c, &rows, seed, seed % 6)) return;
  }
}

// Few tokens are listed as soon as a stage leaves few; ties may be more than a list takes.
TEST(lists_of_the_tokens_that_are_left) {
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    Random random(seed + 77);
    const int64_t vocab = random.any_of<int64_t>({600, 1023, 1500, 3001});
    Rows rows(layout_with(vocab, 16), 1);
    RowCase c = plain_row();
    c.integers.dialect = random.below(4);
    c.numbers.temperature = random.any_of({1.0, 0.7, 1e-3});
    c.integers.top_k = random.any_of<int64_t>({0, 1, 3, 8, 20, 1100});
    if (random.chance(0.5)) c.numbers.min_p = random.any_of({0.02, 0.3});
    if (random.chance(0.5)) c.numbers.top_p = random.any_of({0.3, 0.9});
    if (random.chance(0.3)) c.numbers.typical_p = 0.8;
    if (random.chance(0.2)) c.numbers.adaptive_target = 0.3;
    rows.insert(0, c);
    StepCase step(random, 1, vocab);
    if (step.logits.dtype != DType::kFloat32) continue;
    const int64_t values = random.any_of<int64_t>({1, 2, 4, 1000000});
    float* const logits = reinterpret_cast<float*>(step.logits.memory.data());
    for (int64_t i = 0; i < step.logits.memory.size() / 4; ++i) {
      logits[i] = static_cast<float>(random.below(values)) * (values > 4 ? 1e-5f : 1.0f);
    }
    if (!same_as_cpu(random, step, &rows, seed, seed % 6)) return;
  }
}

// ---- what the CPU's ops refuse before a kernel sees it

struct Refusal {
  Rows rows;

  Refusal(int64_t vocab, int64_t text) : rows(SamplerLayout::of(vocab, text, kMostRules), 2) {
    RowCase row = plain_row();
    row.integers.keeps_text = 1;
    row.prompt = {1, 2, 3};
    rows.insert(0, row);
    row.prompt = {1};
    rows.insert(1, row);
  }
};

constexpr Emulated kEmulated{64, 1, 3};

// The first row has no room, the second one goes on.
TEST(a_row_without_room_is_refused) {
  const Refusal r(40, 3);
  Random random(1);
  StepCase c(random, 2, 40);
  c.accept = true;
  c.num_logprobs = 2;
  c.kept_logits = true;
  const Buffer<char> before = bytes_of(r.rows);
  const StepResult result = step(kEmulated, c, r.rows);
  CHECK_EQ(result.index[0], int64_t{-1});
  CHECK_EQ(result.status[0], kStatusRefused);
  CHECK_EQ(result.rank[0], int64_t{0});
  CHECK_EQ(result.top_ids[1], int64_t{-1});
  CHECK_EQ(result.kept_count[0], 0);
  CHECK(result.kept_logits[0] == minus_infinity());
  CHECK(std::memcmp(result.state.data(), before.data(), r.rows.layout.size) == 0);
  CHECK(result.index[1] >= 0);
  CHECK_EQ(r.rows.row(1).length, int64_t{2});
  c.accept = false;  // a look takes no room
  CHECK(step(kEmulated, c, r.rows).index[0] >= 0);
}

TEST(a_row_of_other_sizes_is_refused) {
  const Refusal r(40, 8);
  Random random(2);
  const StepCase c(random, 2, 40);
  r.rows.view(0).row->integers.dialect = kSamplerDialectCount;
  const StepResult result = step(kEmulated, c, r.rows);
  CHECK_EQ(result.index[0], int64_t{-1});
  CHECK_EQ(result.status[0], kStatusRefused);
  CHECK(result.index[1] >= 0);
}

// There must be room for all that may be accepted, before the first is.
TEST(drafts_without_room_or_number_are_refused) {
  for (const bool is_long : {true, false}) {
    const Refusal r(40, is_long ? 5 : 8);
    Random random(3);
    DraftCase c(random, 2, 40, 2);
    c.num_draft = Buffer<int64_t>(2);
    c.num_draft[0] = is_long ? 2 : 3;
    c.num_draft[1] = 2;
    const Buffer<char> before = bytes_of(r.rows);
    const DraftResult result = verify(kEmulated, c, r.rows);
    CHECK_EQ(result.status[0], kStatusRefused);
    CHECK_EQ(result.num_accepted[0], int64_t{0});
    for (int i = 0; i < 3; ++i) CHECK_EQ(result.tokens[i], int64_t{-1});
    CHECK(std::memcmp(result.state.data(), before.data(), r.rows.layout.size) == 0);
    CHECK(result.tokens[3] >= 0);
    c.num_draft[0] = -1;
    CHECK_EQ(verify(kEmulated, c, r.rows).status[0], kStatusRefused);
  }
}

TEST(more_than_800_calls) {
  std::cout << calls_run << " calls" << std::endl;
  CHECK(check::filtered || calls_run > 800);
}

}  // namespace
}  // namespace lmdecode::sampling::test

CHECK_MAIN()
