// A sampler's CPU kernels at every level: the same bits, on memory of exactly its size.
#include <cstdlib>
#include <iostream>
#include <memory>

#include "check.h"
#include "sampler_calls.h"
#include "sampling/sampler_verify.h"
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
#if defined(LMD_HAS_AVX512)
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

// ---- lives of rows

int64_t calls_run = 0;

StepResult call(const Level& level, const StepCase& c, const Rows& rows) {
  const Workspace workspace(rows.layout);
  const auto run = [&](const SamplerStepParams& p) {
    level.step(p, 0, p.batch / 2, workspace.memory);
    level.step(p, p.batch / 2, p.batch, workspace.memory);
  };
  return step(run, c, rows);
}

DraftResult call(const Level& level, const DraftCase& c, const Rows& rows) {
  const Workspace workspace(rows.layout);
  const auto run = [&](const SamplerVerifyParams& v) {
    level.verify(v, 0, v.step.batch, workspace.memory);
  };
  return verify(run, c, rows);
}

// The same call at every level, from the same rows; these have gone on then.
template <class Case>
bool same_at_all_levels(const Case& c, Rows* rows, uint64_t seed) {
  const Rows before = rows->copy(rows->layout);
  const std::vector<Level> all = levels();
  const auto expected = call(all[0], c, *rows);
  ++calls_run;
  for (size_t i = 1; i < all.size(); ++i) {
    const bool equal = call(all[i], c, before.copy(rows->layout)) == expected;
    CHECK(equal);
    if (!equal) std::cout << all[i].name << " of case " << seed << std::endl;
    if (!equal) return false;
  }
  return true;
}

void run_lives(uint64_t first_seed, int count, int64_t min_vocab, int64_t max_vocab, int steps) {
  for (int i = 0; i < count; ++i) {
    const uint64_t seed = first_seed + static_cast<uint64_t>(i);
    run_life(seed, min_vocab + static_cast<int64_t>(seed) % (max_vocab - min_vocab + 1), steps,
             [](const auto& c, Rows* rows, uint64_t s) { return same_at_all_levels(c, rows, s); });
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
      call(levels().back(), step_case, copy);
      copy.view(0).rewind(random.below(std::min<int64_t>(copy.row(0).output_length, 3) + 1));
    }
    if (copy.row(0).integers.keeps_text == 0) continue;
    copy.view(0).rewind(copy.row(0).output_length);
    while (copy.view(0).has_room()) copy.view(0).accept(random.below(vocab));
    StepCase looks(random, 1, vocab);
    looks.accept = false;
    call(levels().front(), looks, copy);
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
