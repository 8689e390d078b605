// Random steps of beam searches with rules of their own, in heap buffers of exactly their size.
#pragma once

#include <algorithm>
#include <vector>

#include "beam/search_step.h"
#include "beam/token_trie_build.h"
#include "beam_search_case.h"

namespace lmdecode::beam::test {

constexpr int64_t kVocab = 45, kCapacity = 12, kBeams = 4, kPrompt = 2, kBans = 2;

template <class T>
Buffer<T> copy_of(const Buffer<T>& from) {
  Buffer<T> to(from.size());
  std::copy(from.data(), from.data() + from.size(), to.data());
  return to;
}

// A search, and the group that it is of its request.
struct GroupSearch {
  SearchOfStep numbers;
  int64_t group;
};

// Requests of one to three groups, each with rules of its own, and what a step writes of them.
struct Requests {
  Random random;
  std::vector<GroupSearch> searches;
  int64_t rows = 0;
  StateMemory memory;
  Buffer<int64_t> num_beams, num_hypotheses, prompt_lengths, max_lengths, early_stopping,
      end_tokens, pad_tokens, ngram_sizes, bans, forced, trie_numbers;
  Buffer<double> length_penalty;
  Buffer<float> repetition_penalty, diversity_penalty, bias;
  Buffer<int32_t> nodes;
  TokenTrieArrays trie;
  std::vector<TokenTrie> tries;
  bool has_bias, has_tries = false, looks_back, bans_tokens, forces, diverges;

  // greedy: of one beam each, without tries.
  explicit Requests(uint64_t seed, bool greedy = false) : random(seed * 977 + 5) {
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
    // One, or more than a kernel's parameter has room for.
    tries.resize(random.chance(0.5) ? 1 : 70, {trie.tokens.data(), trie.child_begin.data(),
                                               static_cast<int64_t>(trie.tokens.size())});
    trie_numbers = Buffer<int64_t>(s.slots);
    fill(trie_numbers, int64_t{-1});
    int64_t slot = 0;
    for (int64_t request = 0; request < requests; ++request) {
      const int64_t dialect = random.below(3), width = greedy ? 1 : 1 + random.below(kBeams);
      const bool is_held = dialect != 1 && groups[static_cast<size_t>(request)] == 1;
      if (is_held && !greedy && random.chance(0.5)) {
        trie_numbers[slot] = random.below(static_cast<int64_t>(tries.size()));
        has_tries = true;
      }
      const int64_t first = rows;
      for (int64_t group = 0; group < groups[static_cast<size_t>(request)]; ++group, ++slot) {
        num_beams[slot] = width;
        searches.push_back(
            {{slot, slot, dialect, rows, width, 0, rows, rows + width, rows - first}, group});
        rows += width;
      }
    }
    std::stable_sort(searches.begin(), searches.end(),
                     [](const auto& a, const auto& b) { return a.group < b.group; });
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
    bans = Buffer<int64_t>(slots * kBans * 4);
    forced = Buffer<int64_t>(slots * 2);
    length_penalty = Buffer<double>(slots);
    repetition_penalty = Buffer<float>(slots);
    diversity_penalty = Buffer<float>(slots);
    bias = Buffer<float>(slots * kVocab);
    nodes = Buffer<int32_t>(slots * kBeams);
    has_bias = random.chance(0.3);
    looks_back = random.chance(0.6);
    bans_tokens = random.chance(0.6);
    forces = random.chance(0.6);
    diverges = random.chance(0.7);
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
      for (int64_t i = 0; i < kBans; ++i) {
        int64_t* const ban = bans.data() + (slot * kBans + i) * 4;
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
struct StepOfRequests {
  std::vector<SearchOfStep> searches;
  std::vector<PassOfStep> passes;
  Buffer<int64_t> tokens, parents, ended, candidates, beams;
  Buffer<float> scores, log_probs;
  Buffer<int32_t> decisions;
  Buffer<uint8_t> status;
  SearchStepParams params;
  SearchStepSizes sizes;

  // Rows of logits and of next beams are those of all requests, whoever steps.
  StepOfRequests(const Requests& r, const StateMemory& memory, const Buffer<int32_t>& nodes,
                 const std::vector<GroupSearch>& of_requests, const void* logits, DType dtype,
                 const int32_t* bitmask, int64_t num_candidates)
      : tokens(r.rows), parents(r.rows) {
    for (const GroupSearch& search : of_requests) {
      if (passes.empty() || search.group != of_requests[searches.size() - 1].group) {
        passes.push_back({0, 0, 0});
      }
      PassOfStep& pass = passes.back();
      searches.push_back(search.numbers);
      searches.back().pass_row = pass.rows;
      pass.rows += search.numbers.num_rows;
      pass.num_earlier = std::max(pass.num_earlier, search.numbers.num_earlier);
      ++pass.searches;
    }
    const int64_t count = static_cast<int64_t>(searches.size());
    ended = Buffer<int64_t>(count);
    candidates = Buffer<int64_t>(count * num_candidates);
    beams = Buffer<int64_t>(count * num_candidates);
    scores = Buffer<float>(count * num_candidates);
    log_probs = Buffer<float>(count * num_candidates);
    decisions = Buffer<int32_t>(count * num_candidates);
    status = Buffer<uint8_t>(count);
    SearchStepParams& p = params;
    p.state = memory.state();
    p.parameters = {r.num_beams.data(),   r.num_hypotheses.data(), r.prompt_lengths.data(),
                    r.max_lengths.data(), r.length_penalty.data(), r.early_stopping.data(),
                    r.end_tokens.data(),  r.pad_tokens.data(),     1};
    TokenRules& rules = p.token_rules;
    rules.rows = memory.sizes.slots;
    if (r.looks_back) rules.repetition_penalty = r.repetition_penalty.data();
    if (r.looks_back) rules.no_repeat_ngram_size = r.ngram_sizes.data();
    if (r.diverges) rules.diversity_penalty = r.diversity_penalty.data();
    rules.bans = r.bans.data();
    rules.num_bans = r.bans_tokens ? kBans : 0;
    rules.forced = r.forced.data();
    rules.num_forced = r.forces ? 1 : 0;
    if (r.has_bias) rules.bias = r.bias.data();
    rules.bias_stride = kVocab;
    if (r.has_tries) {
      rules.trie_numbers = r.trie_numbers.data();
      rules.tries = r.tries.data();
      rules.num_tries = static_cast<int64_t>(r.tries.size());
    }
    p.searches = searches.data();
    p.count = count;
    p.passes = passes.data();
    p.num_passes = static_cast<int64_t>(passes.size());
    p.num_candidates = num_candidates;
    p.logits = const_cast<void*>(logits);
    p.dtype = dtype;
    p.rows = p.next_rows = r.rows;
    p.vocab = p.logits_row_stride = kVocab;
    p.token_bitmask = bitmask;
    p.bitmask_row_stride = (kVocab + 31) / 32;
    p.nodes = nodes.data();
    p.next_tokens = tokens.data();
    p.next_parents = parents.data();
    p.ended = ended.data();
    p.scores = scores.data();
    p.log_probs = log_probs.data();
    p.tokens = candidates.data();
    p.beams = beams.data();
    p.decisions = decisions.data();
    p.status = status.data();
    for (const PassOfStep& pass : passes) {
      sizes.searches = std::max(sizes.searches, pass.searches);
      sizes.rows = std::max(sizes.rows, pass.rows);
      sizes.num_earlier = std::max(sizes.num_earlier, pass.num_earlier);
    }
    sizes.next_rows = r.rows;
    sizes.num_candidates = num_candidates;
    sizes.num_bans = rules.num_bans;
    sizes.capacity = kCapacity;
    sizes.vocab = kVocab;
    sizes.num_tries = rules.num_tries;
    sizes.has_rules = true;
  }

  bool operator==(const StepOfRequests& other) const {
    return tokens == other.tokens && parents == other.parents && ended == other.ended &&
           candidates == other.candidates && beams == other.beams && scores == other.scores &&
           log_probs == other.log_probs && decisions == other.decisions && status == other.status;
  }
};

}  // namespace lmdecode::beam::test
