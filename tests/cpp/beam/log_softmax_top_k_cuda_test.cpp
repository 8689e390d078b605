// The emulated CUDA kernels of log_softmax_top_k and trie_step against the CPU's bits.
#include <iostream>

#include "beam/trie_kernel.cuh"
#include "check.h"
#include "emulated_log_softmax_top_k.h"

namespace lmdecode::beam::test {
namespace {

enum class Processors { kNone, kSome, kTrie };

int64_t cases_run = 0, launches_run = 0;

void run_cases(uint64_t first_seed, int count, int64_t min_vocab, int64_t max_vocab, int schedules,
               Processors kind = Processors::kNone, float beam_score = 0.0f) {
  for (int i = 0; i < count; ++i) {
    const uint64_t seed = first_seed + static_cast<uint64_t>(i);
    Random random(seed * 7919 + 1);
    const int64_t vocab = min_vocab + random.below(max_vocab - min_vocab + 1);
    BeamCase c = random_case(seed, vocab > 2000 ? 1 : 1 + random.below(3), vocab);
    for (int64_t row = 0; row < c.params.rows && beam_score != 0.0f; ++row) {
      c.beam_scores[row * c.params.beam_scores_stride] = beam_score;
    }
    ProcessorCase processor_case;
    if (kind != Processors::kNone) processor_case = random_processors(random, c.params);
    if (kind == Processors::kTrie) add_trie(random, c.params, &processor_case, true);
    const ProcessorCase* processors = kind == Processors::kNone ? nullptr : &processor_case;
    const BeamResult expected = run_cpu(c, processors);
    ++cases_run;
    for (int s = 0; s < schedules; ++s) {
      const uint64_t schedule =
          schedules == 6 ? static_cast<uint64_t>(s) : (seed + static_cast<uint64_t>(s)) % 6;
      const Layout layout = random_layout(random, c);
      ++launches_run;
      std::string what;
      try {
        const BeamResult result = run_emulated(c, processors, layout, schedule);
        if (result == expected) continue;
        what = difference(c, expected, result);
      } catch (const std::exception& error) {
        what = error.what();
      }
      CHECK(what.empty());
      std::cout << "seed " << seed << " " << c.describe() << "\n  " << describe(layout)
                << " schedule " << schedule << what << std::endl;
      return;
    }
  }
}

TEST(small_rows_on_all_schedules) { run_cases(1, 40, 1, 70, 6); }
TEST(small_rows) { run_cases(1000, 200, 1, 70, 2); }
TEST(rows_about_a_power_of_two) { run_cases(2000, 30, 127, 129, 2); }
TEST(rows_of_1000) { run_cases(3000, 20, 1000, 1003, 1); }
TEST(rows_of_5000) { run_cases(4000, 6, 4999, 5003, 1); }

// So far from zero that scores are 1/16 apart, and many logits have the same one.
TEST(rows_with_ties_of_scores) {
  run_cases(4500, 20, 1000, 1003, 1, Processors::kNone, -1e6f);
  run_cases(4600, 20, 1000, 1003, 1, Processors::kSome, -1e6f);
}

TEST(processors_on_all_schedules) { run_cases(5000, 40, 1, 70, 6, Processors::kSome); }
TEST(processors_on_small_rows) { run_cases(6000, 200, 1, 70, 2, Processors::kSome); }
TEST(processors_on_rows_of_1000) { run_cases(7000, 20, 1000, 1003, 1, Processors::kSome); }
TEST(processors_on_rows_of_5000) { run_cases(8000, 6, 4999, 5003, 1, Processors::kSome); }

TEST(tries_on_all_schedules) { run_cases(9000, 60, 1, 70, 6, Processors::kTrie); }
TEST(tries_on_small_rows) { run_cases(10000, 300, 1, 70, 2, Processors::kTrie); }
TEST(tries_on_rows_of_1000) { run_cases(11000, 30, 1000, 1003, 1, Processors::kTrie); }
TEST(tries_on_rows_of_5000) { run_cases(12000, 8, 4999, 5003, 1, Processors::kTrie); }

// A walk from random nodes, with tokens that lead on and tokens that do not.
TEST(trie_step) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    Random random(seed);
    LogSoftmaxTopKParams p;
    p.requests = 1;
    p.rows = random.any_of<int64_t>({0, 1, 5, 300, 700});
    p.vocab = random.any_of<int64_t>({2, 40});
    ProcessorCase c;
    add_trie(random, p, &c, true);
    const int64_t stride = 1 + random.below(2);
    const Buffer<int64_t> tokens(p.rows * stride);
    const Buffer<int32_t> next(p.rows);
    for (int64_t i = 0; i < p.rows; ++i) {
      tokens.data()[i * stride] = random.below(p.vocab + 2) - 1;
      next.data()[i] = 77;
    }
    const TokenTrie trie = c.processors.tries.value;
    const TrieStepParams params{trie, p.rows, c.nodes.data(), tokens.data(), stride, next.data()};
    emulation::launch(cuda_kernels::trie_step_kernel,
                      dim3(1 + static_cast<unsigned>(random.below(3))), dim3(64), 1, 0, seed % 6,
                      params);
    for (int64_t i = 0; i < p.rows; ++i) {
      CHECK(next[i] == trie.child(c.nodes[i], tokens[i * stride]));
    }
  }
}

TEST(more_than_200_cases) {
  std::cout << cases_run << " cases, " << launches_run << " launches" << std::endl;
  CHECK(cases_run > 200);
}

}  // namespace
}  // namespace lmdecode::beam::test

CHECK_MAIN()
