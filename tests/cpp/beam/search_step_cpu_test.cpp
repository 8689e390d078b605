// search_step_cpu under sanitizers, on memory of exactly the sizes that it asks for: a search with
// any rules moves as it does alone, whatever others are in the step, and nothing is allocated.
#include <algorithm>
#include <vector>

#include "beam/search_step.h"
#include "beam/token_trie_build.h"
#include "beam_search_case.h"
#include "check.h"
#include "decoder/exact_memory.h"

// Of the sanitizer's runtime, whose header not every compiler brings.
extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*malloc_hook)(const volatile void*,
                                                                             size_t),
                                                         void (*free_hook)(const volatile void*));

namespace lmdecode::beam::test {
namespace {

using decoder::Exactly;

constexpr int64_t kVocab = 45, kCapacity = 12, kBeams = 4, kPrompt = 2;

int64_t allocations = 0;
void count_allocation(const volatile void*, size_t) { ++allocations; }
void ignore_free(const volatile void*) {}

// Requests of one to three groups, each with rules of its own, and what a step writes of them.
struct Requests {
  Random random;
  std::vector<SearchOfStep> searches;
  int64_t rows = 0;
  StateMemory memory;
  Buffer<int64_t> num_beams, num_hypotheses, prompt_lengths, max_lengths, early_stopping,
      end_tokens, pad_tokens, ngram_sizes, bans, forced;
  Buffer<double> length_penalty;
  Buffer<float> repetition_penalty, diversity_penalty, bias;
  Buffer<int32_t> nodes;
  TokenTrieArrays trie;
  std::vector<TokenTrie> tries;
  bool has_bias;

  explicit Requests(uint64_t seed) : random(seed * 977 + 5) {
    const int64_t requests = 1 + random.below(3);
    std::vector<int64_t> groups;
    for (int64_t i = 0; i < requests; ++i) groups.push_back(1 + random.below(3));
    BeamSearchState s;
    for (const int64_t count : groups) s.slots += count;
    s.beams = s.hypotheses = kBeams;
    s.capacity = s.log_prob_capacity = kCapacity;
    memory = StateMemory(s);
    make_parameters(s.slots);
    const int64_t items[] = {3, 4, 5, 3, 6, 7, 8}, offsets[] = {0, 3, 5, 7};
    trie = build_token_trie(items, offsets, 3);
    tries.resize(static_cast<size_t>(s.slots));
    int64_t slot = 0;
    for (int64_t request = 0; request < requests; ++request) {
      const int64_t rules = random.below(3), width = 1 + random.below(kBeams);
      const bool is_held = rules != 1 && groups[static_cast<size_t>(request)] == 1;
      if (is_held && random.chance(0.5)) {
        tries[static_cast<size_t>(slot)] = {trie.tokens.data(), trie.child_begin.data(),
                                            static_cast<int64_t>(trie.tokens.size())};
      }
      const int64_t first = rows;
      for (int64_t group = 0; group < groups[static_cast<size_t>(request)]; ++group, ++slot) {
        num_beams[slot] = width;
        searches.push_back({slot, slot, group, rules, rows, width, rows, rows - first});
        rows += width;
      }
    }
    std::stable_sort(searches.begin(), searches.end(), [](const auto& a, const auto& b) {
      return a.group != b.group ? a.group < b.group : a.rules < b.rules;
    });
  }

  void make_parameters(int64_t slots) {
    num_beams = Buffer<int64_t>(slots);
    num_hypotheses = Buffer<int64_t>(slots);
    prompt_lengths = Buffer<int64_t>(slots);
    max_lengths = Buffer<int64_t>(slots);
    early_stopping = Buffer<int64_t>(slots);
    end_tokens = Buffer<int64_t>(slots);
    pad_tokens = Buffer<int64_t>(slots);
    ngram_sizes = Buffer<int64_t>(slots);
    bans = Buffer<int64_t>(slots * 2 * 4);
    forced = Buffer<int64_t>(slots * 2);
    length_penalty = Buffer<double>(slots);
    repetition_penalty = Buffer<float>(slots);
    diversity_penalty = Buffer<float>(slots);
    bias = Buffer<float>(slots * kVocab);
    nodes = Buffer<int32_t>(slots * kBeams);
    has_bias = random.chance(0.3);
    fill(memory.hypothesis_numbers, int64_t{-1});
    fill(memory.worst_scores, 1e9);
    for (int64_t slot = 0; slot < slots; ++slot) {
      num_hypotheses[slot] = 1 + random.below(kBeams);
      prompt_lengths[slot] = memory.lengths[slot] = kPrompt;
      max_lengths[slot] = kCapacity - random.below(3);
      early_stopping[slot] = random.below(3);
      end_tokens[slot] = random.below(6) - 1;
      length_penalty[slot] = random.any_of({1.0, 0.0, 2.0});
      ngram_sizes[slot] = random.below(3);
      repetition_penalty[slot] = random.any_of({1.0f, 1.3f});
      diversity_penalty[slot] = 0.5f;
      for (int64_t i = 0; i < 2; ++i) {
        int64_t* const ban = bans.data() + (slot * 2 + i) * 4;
        ban[0] = random.below(kVocab + 2) - 1;
        ban[2] = random.below(kCapacity);
        ban[3] = random.below(2);
      }
      forced[slot * 2] = random.chance(0.3) ? kPrompt + random.below(4) : -1;
      forced[slot * 2 + 1] = random.below(kVocab);
      for (int64_t i = 0; i < kVocab; ++i) {
        bias[slot * kVocab + i] = static_cast<float>(random.normal());
      }
      for (int64_t i = 0; i < kBeams * kCapacity; ++i) {
        memory.sequences[slot * kBeams * kCapacity + i] = random.below(kVocab);
      }
    }
  }

  bool goes_on(int64_t slot) const {
    return memory.done[slot] == 0 && memory.lengths[slot] < kCapacity;
  }
};

// What a step of some of the searches gives, in memory of its own.
struct Step {
  Buffer<int64_t> tokens, parents, candidates, beams;
  Buffer<float> scores, log_probs;
  Buffer<int32_t> decisions;
  Buffer<uint8_t> status;
  int64_t allocated = 0;

  // Rows of logits and of next beams are those of all requests, whoever steps.
  Step(Requests& r, const StateMemory& memory, const Buffer<int32_t>& nodes,
       const std::vector<SearchOfStep>& searches, const float* logits, const int32_t* bitmask,
       int64_t num_candidates)
      : tokens(r.rows), parents(r.rows) {
    const int64_t count = static_cast<int64_t>(searches.size());
    candidates = Buffer<int64_t>(count * num_candidates);
    beams = Buffer<int64_t>(count * num_candidates);
    scores = Buffer<float>(count * num_candidates);
    log_probs = Buffer<float>(count * num_candidates);
    decisions = Buffer<int32_t>(count * num_candidates);
    status = Buffer<uint8_t>(count);
    SearchStepParams p;
    p.state = memory.state();
    p.parameters = {r.num_beams.data(),   r.num_hypotheses.data(), r.prompt_lengths.data(),
                    r.max_lengths.data(), r.length_penalty.data(), r.early_stopping.data(),
                    r.end_tokens.data(),  r.pad_tokens.data(),     1};
    p.token_rules.repetition_penalty = r.repetition_penalty.data();
    p.token_rules.no_repeat_ngram_size = r.ngram_sizes.data();
    p.token_rules.diversity_penalty = r.diversity_penalty.data();
    p.token_rules.bans = r.bans.data();
    p.token_rules.num_bans = 2;
    p.token_rules.forced = r.forced.data();
    p.token_rules.num_forced = 1;
    if (r.has_bias) p.token_rules.bias = r.bias.data();
    p.token_rules.bias_stride = kVocab;
    p.token_rules.tries = r.tries.data();
    p.searches = searches.data();
    p.count = count;
    p.num_candidates = num_candidates;
    p.logits = const_cast<float*>(logits);
    p.rows = p.next_rows = r.rows;
    p.vocab = p.logits_row_stride = kVocab;
    p.token_bitmask = bitmask;
    p.bitmask_row_stride = (kVocab + 31) / 32;
    p.nodes = nodes.data();
    p.next_tokens = tokens.data();
    p.next_parents = parents.data();
    p.scores = scores.data();
    p.log_probs = log_probs.data();
    p.tokens = candidates.data();
    p.beams = beams.data();
    p.decisions = decisions.data();
    p.status = status.data();
    SearchStepSizes sizes;
    sizes.searches = count;
    sizes.rows = r.rows;
    sizes.num_candidates = num_candidates;
    sizes.num_bans = 2;
    for (const SearchOfStep& s : searches) {
      sizes.num_earlier = std::max(sizes.num_earlier, s.num_earlier);
    }
    sizes.capacity = kCapacity;
    sizes.vocab = kVocab;
    Exactly<unsigned char> workspace(static_cast<int64_t>(search_step_workspace_bytes(sizes)));
    const int64_t before = allocations;
    search_step_cpu(p, sizes, workspace.get());
    allocated = allocations - before;
  }
};

Buffer<int32_t> copy_of(const Buffer<int32_t>& from) {
  Buffer<int32_t> to(from.size());
  std::copy(from.data(), from.data() + from.size(), to.data());
  return to;
}

TEST(searches_move_as_alone) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    Requests r(seed);
    for (int step = 0; step < 8; ++step) {
      std::vector<SearchOfStep> all;
      for (const SearchOfStep& s : r.searches) {
        if (r.goes_on(s.slot)) all.push_back(s);
      }
      // Where a group has ended, what later ones would look at is not written.
      if (all.size() < r.searches.size()) break;
      Buffer<float> logits(r.rows * kVocab);
      for (int64_t i = 0; i < logits.size(); ++i) {
        logits[i] = static_cast<float>(r.random.normal() * 2);
      }
      if (r.random.chance(0.05)) logits[r.random.below(logits.size())] = std::nanf("");
      Buffer<int32_t> bitmask(r.rows * ((kVocab + 31) / 32));
      fill(bitmask, r.random.chance(0.3) ? int32_t{0x5f5f5f5f} : int32_t{-1});
      const int64_t k = 2 * kBeams;
      StateMemory alone = r.memory.copy();
      Buffer<int32_t> nodes_alone = copy_of(r.nodes);
      const Step together(r, r.memory, r.nodes, all, logits.data(), bitmask.data(), k);
      for (const SearchOfStep& first : all) {
        if (first.group != 0) continue;
        std::vector<SearchOfStep> request;
        for (const SearchOfStep& s : all) {
          if (s.next_row - s.num_earlier == first.next_row) request.push_back(s);
        }
        const Step own(r, alone, nodes_alone, request, logits.data(), bitmask.data(), k);
        for (const SearchOfStep& s : request) {
          for (int64_t beam = 0; beam < r.num_beams[s.slot]; ++beam) {
            CHECK_EQ(own.tokens[s.next_row + beam], together.tokens[s.next_row + beam]);
            CHECK_EQ(own.parents[s.next_row + beam], together.parents[s.next_row + beam]);
          }
        }
      }
      CHECK(alone == r.memory);
      CHECK(nodes_alone == r.nodes);
    }
  }
}

TEST(steps_allocate_nothing) {
  __sanitizer_install_malloc_and_free_hooks(count_allocation, ignore_free);
  Requests r(3);
  Buffer<float> logits(r.rows * kVocab);
  for (int64_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(r.random.normal());
  Buffer<int32_t> bitmask(r.rows * ((kVocab + 31) / 32));
  fill(bitmask, int32_t{-1});
  for (int step = 0; step < 3; ++step) {
    const Step done(r, r.memory, r.nodes, r.searches, logits.data(), bitmask.data(), 2 * kBeams);
    // What a thread keeps between calls it takes in the first one.
    CHECK(step == 0 || done.allocated == 0);
  }
}

}  // namespace
}  // namespace lmdecode::beam::test

CHECK_MAIN()
