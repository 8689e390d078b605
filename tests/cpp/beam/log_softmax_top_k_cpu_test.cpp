// The CPU kernels of log_softmax_top_k at every level against a plain sort, on exact memory.
#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <memory>

#include "beam/candidate_score.h"
#include "beam/log_softmax_top_k.h"
#include "beam/processor_edits.h"
#include "check.h"
#include "processor_case.h"
#include "sampling/sampling_workspace.h"
#include "simd/cpu_capability.h"

namespace lmdecode::beam::test {
namespace {

using Rows = void (*)(const LogSoftmaxTopKParams&, int64_t, int64_t, void*);
using ProcessedRows = void (*)(const LogSoftmaxTopKParams&, const LogitsProcessors&, int64_t,
                               int64_t, int64_t, void*);
using Requests = void (*)(const LogSoftmaxTopKParams&, int64_t, int64_t, int64_t, void*);

struct Level {
  const char* name;
  Rows rows;
  ProcessedRows processed_rows;
  Requests requests;
};

std::unique_ptr<void, void (*)(void*)> workspace_for(int64_t size, size_t more = 0) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, sampling::sampling_workspace_bytes(size) + more) != 0)
    throw std::bad_alloc();
  return {memory, std::free};
}

// processors: null where there are none.
BeamResult run(const Level& level, const BeamCase& c, const ProcessorCase* processors,
               int64_t first_part) {
  BeamResult result(c.params);
  const LogSoftmaxTopKParams params = c.params_into(result);
  if (processors == nullptr) {
    const auto memory = workspace_for(params.vocab);
    level.rows(params, 0, first_part, memory.get());
    level.rows(params, first_part, params.rows, memory.get());
  } else {
    const int64_t edits = processors->max_edits;
    const auto memory = workspace_for(params.vocab, TokenEdits::bytes(edits, params.vocab));
    const LogitsProcessors& all = processors->processors;
    level.processed_rows(params, all, edits, 0, first_part, memory.get());
    level.processed_rows(params, all, edits, first_part, params.rows, memory.get());
  }
  const int64_t size = c.most_beams() * params.row_candidates;
  const auto request_memory = workspace_for(size);
  level.requests(params, 0, params.requests, size, request_memory.get());
  return result;
}

float logit_at(const LogSoftmaxTopKParams& p, int64_t row, int64_t token) {
  const int64_t at = row * p.logits_row_stride + token * p.logits_vocab_stride;
  if (p.dtype == DType::kFloat32) return static_cast<const float*>(p.logits)[at];
  const uint16_t bits = static_cast<const uint16_t*>(p.logits)[at];
  return p.dtype == DType::kFloat16 ? to_float(Half{bits}) : to_float(BFloat16{bits});
}

// Every score of a request, sorted.
BeamResult by_sorting(const BeamCase& c, const ProcessorCase* processors) {
  BeamResult result(c.params);
  const LogSoftmaxTopKParams p = c.params_into(result);
  struct Candidate {
    float score;
    int64_t token, beam;
    float log_prob;
  };
  for (int64_t r = 0; r < p.requests; ++r) {
    const auto rows = p.rows_of(r);
    std::vector<Candidate> all;
    uint8_t status = 0;
    const TokenTrie trie = processors != nullptr ? processors->processors.tries.at(r) : TokenTrie{};
    const bool has_trie = trie.tokens != nullptr;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const float beam_score = p.beam_scores[row * p.beam_scores_stride];
      status |= beam_score_status(beam_score);
      if (beam_score_status(beam_score) != 0 || !is_alive(beam_score)) continue;
      int64_t forced = -1;
      if (has_trie) {
        const LogitsProcessors& all_rows = processors->processors;
        if (all_rows.forced_tokens.data != nullptr) forced = all_rows.forced_tokens.at(r, row)[0];
        const bool has_forced = forced >= 0 && forced < p.vocab;
        const TokenTrie::Children children = trie.children(all_rows.nodes[row]);
        if (beam_score <= kRealBeamScoreBound) continue;
        if (children.begin == children.end && !has_forced) continue;
      }
      float top = minus_infinity();
      bool nan = false;
      for (int64_t v = 0; v < p.vocab; ++v) {
        nan |= std::isnan(logit_at(p, row, v));
        top = std::max(top, logit_at(p, row, v) + 0.0f);
      }
      if (nan || top == minus_infinity()) {
        status |= nan ? kBeamStatusNan : kBeamStatusEmpty;
        continue;
      }
      const int fraction_bits = mass_fraction_bits(p.vocab);
      uint64_t total = 0;
      for (int64_t v = 0; v < p.vocab; ++v) {
        const float x = logit_at(p, row, v);
        total += top == plus_infinity() ? x == top
                                        : token_mass(x, top, exponent_factor(1.0f), fraction_bits);
      }
      const CandidateScore score = CandidateScore::of_row(top, total, fraction_bits, beam_score);
      bool made_nan = false;
      for (int64_t v = 0; v < p.vocab; ++v) {
        const bool allowed =
            !has_trie || trie.child(processors->processors.nodes[row], v) != kOffTrie;
        if (!allowed && v != forced) continue;
        float log_prob = score.log_prob(logit_at(p, row, v));
        if (processors != nullptr) {
          bool is_nan = false;
          log_prob = processed(processors->processors, r, row, p.vocab, v, log_prob, &is_nan);
          made_nan |= is_nan && allowed;
        }
        const float s = log_prob + beam_score + 0.0f;
        if (s > minus_infinity()) all.push_back({s, v, row - rows.begin, log_prob});
      }
      if (made_nan) status |= kBeamStatusNan;
    }
    if (status == 0 && all.empty() && !has_trie) status = kBeamStatusEmpty;
    if (status != 0) all.clear();
    std::stable_sort(all.begin(), all.end(),
                     [](const Candidate& a, const Candidate& b) { return a.score > b.score; });
    all.resize(static_cast<size_t>(p.num_candidates), {minus_infinity(), 0, 0, minus_infinity()});
    for (int64_t i = 0; i < p.num_candidates; ++i) {
      const Candidate& candidate = all[static_cast<size_t>(i)];
      p.scores[r * p.num_candidates + i] = candidate.score;
      p.tokens[r * p.num_candidates + i] = candidate.token;
      p.beams[r * p.num_candidates + i] = candidate.beam;
      p.log_probs[r * p.num_candidates + i] = candidate.log_prob;
    }
    p.status[r] = status;
  }
  return result;
}

int64_t cases_run = 0;

void run_cases(uint64_t first_seed, int count, int64_t min_vocab, int64_t max_vocab,
               bool with_processors, bool with_tries = false) {
#define LMD_LEVEL(level)                              \
  Level{#level, &level::beam::log_softmax_top_k_rows, \
        &level::beam::log_softmax_top_k_processed_rows, &level::beam::log_softmax_top_k_requests}
  std::vector<Level> levels = {LMD_LEVEL(default_)};
#if defined(LMD_HAS_AVX512)
  const CpuCapability best = max_cpu_capability();
  if (best >= CpuCapability::kAvx2) levels.push_back(LMD_LEVEL(avx2));
  if (best >= CpuCapability::kAvx512) levels.push_back(LMD_LEVEL(avx512));
#endif
#undef LMD_LEVEL
  for (int i = 0; i < count; ++i) {
    const uint64_t seed = first_seed + static_cast<uint64_t>(i);
    Random random(seed * 104729 + 1);
    const int64_t vocab = min_vocab + random.below(max_vocab - min_vocab + 1);
    const BeamCase c = random_case(seed, 1 + random.below(3), vocab);
    ProcessorCase processor_case;
    if (with_processors) processor_case = random_processors(random, c.params);
    if (with_tries) add_trie(random, c.params, &processor_case);
    const ProcessorCase* processors = with_processors || with_tries ? &processor_case : nullptr;
    const BeamResult expected = by_sorting(c, processors);
    ++cases_run;
    for (const Level& level : levels) {
      const BeamResult result = run(level, c, processors, random.below(c.params.rows + 1));
      const bool equal = result == expected;
      CHECK(equal);
      if (equal) continue;
      std::cout << level.name << ": seed " << seed << " " << c.describe()
                << difference(c, expected, result) << std::endl;
      return;
    }
  }
}

TEST(small_rows) { run_cases(1, 1500, 1, 70, false); }
TEST(rows_about_a_power_of_two) { run_cases(10000, 200, 126, 130, false); }
TEST(rows_of_1000) { run_cases(20000, 150, 990, 1030, false); }
TEST(rows_of_5000) { run_cases(30000, 60, 4090, 5003, false); }
TEST(rows_of_20000) { run_cases(40000, 15, 19997, 20011, false); }

TEST(processors_on_small_rows) { run_cases(50000, 1500, 1, 70, true); }
TEST(processors_on_rows_of_1000) { run_cases(60000, 300, 990, 1030, true); }
TEST(processors_on_rows_of_5000) { run_cases(70000, 100, 4090, 5003, true); }

TEST(tries_on_small_rows) { run_cases(80000, 1000, 1, 70, false, true); }
TEST(tries_with_processors_on_small_rows) { run_cases(85000, 1500, 1, 70, true, true); }
TEST(tries_with_processors_on_rows_of_1000) { run_cases(90000, 200, 990, 1030, true, true); }

// Arrays that hold anything: nothing is read beside them, and a row has room for its candidates.
TEST(arrays_that_are_no_trie) {
  Random random(7);
  for (int i = 0; i < 300; ++i) {
    const BeamCase c = random_case(95000 + static_cast<uint64_t>(i), 2, 1 + random.below(40));
    ProcessorCase processors;
    add_trie(random, c.params, &processors);
    const int64_t nodes = processors.tries[0].tokens != nullptr ? processors.tries[0].nodes : 0;
    for (int64_t n = 0; n < nodes; ++n) {
      const int64_t any = random.below(2 * nodes) - 3;
      if (random.chance(0.3)) processors.child_begin[n] = static_cast<int32_t>(any);
      if (random.chance(0.3)) processors.trie_tokens[n] = static_cast<int32_t>(any);
    }
    const Level level{"default_", &default_::beam::log_softmax_top_k_rows,
                      &default_::beam::log_softmax_top_k_processed_rows,
                      &default_::beam::log_softmax_top_k_requests};
    const BeamResult result = run(level, c, &processors, 0);
    for (int64_t j = 0; j < c.params.requests * c.params.num_candidates; ++j) {
      CHECK(result.tokens[j] >= 0 && result.tokens[j] < c.params.vocab);
    }
  }
}

TEST(cases_counted) {
  std::cout << cases_run << " cases up to level " << cpu_capability_name(max_cpu_capability())
            << std::endl;
}

}  // namespace
}  // namespace lmdecode::beam::test

CHECK_MAIN()
