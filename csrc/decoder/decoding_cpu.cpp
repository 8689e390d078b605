#include <algorithm>

#include "beam/search_step.h"
#include "common/float_mode.h"
#include "common/split_memory.h"
#include "decoder/beam_parents.h"
#include "decoder/decoder_forward.h"
#include "decoder/decoding.h"

namespace lmdecode::decoder {
namespace {

struct DecodingWorkspace {
  unsigned char* forward;  // of DecoderForward

  // The unfinished searches, group after group.
  int64_t* slots;            // [slots]
  int64_t* padding;          // [slots]: of their prompts
  int64_t* row_offsets;      // [slots + 1]: where the rows of each begin, in the step
  uint8_t* are_beams_alike;  // [slots]: whether its beams have one row of the model's

  // Of a step: beam/search_step.h.
  beam::SearchOfStep* searches;  // [slots]
  beam::PassOfStep* passes;      // [num_groups]
  unsigned char* step;           // scratch
  float* scores;                 // [slots, num_candidates]
  float* log_probs;              // likewise
  int64_t* tokens;               // likewise
  int64_t* beams;                // likewise
  int32_t* decisions;            // likewise
  uint8_t* status;               // [slots]
  int64_t* next_tokens;          // [slots, beams]
  int64_t* next_parents;         // [slots, beams]

  int32_t* nodes;  // [slots, beams]: of the beams that tries hold

  BeamParents parents;

  static constexpr int64_t kPromptRows = 64;  // tokens of prompts at a time, at least

  static int64_t max_rows(const DecodingParams& p) {
    return p.cache_rows() > kPromptRows ? p.cache_rows() : kPromptRows;
  }

  static beam::SearchStepSizes step_sizes(const DecodingParams& p) {
    beam::SearchStepSizes sizes;
    sizes.searches = p.state.slots;
    sizes.rows = sizes.next_rows = p.cache_rows();
    sizes.num_candidates = p.num_candidates;
    sizes.num_bans = p.token_rules.num_bans;
    sizes.num_earlier = (p.num_groups - 1) * p.state.beams;
    sizes.capacity = p.state.capacity;
    sizes.vocab = p.config.vocab;
    sizes.is_row_by_row = true;
    return sizes;
  }

  // Returns the bytes; with null for the memory it only counts them.
  size_t split(const DecodingParams& p, void* memory) {
    const int64_t cache_rows = p.cache_rows(), slot_count = p.state.slots;
    const int64_t candidates = slot_count * p.num_candidates;
    SplitMemory block(memory);
    block.take(&forward,
               static_cast<int64_t>(DecoderForward::bytes(p.config, max_rows(p), cache_rows)));
    block.take(&slots, slot_count);
    block.take(&padding, slot_count);
    block.take(&row_offsets, slot_count + 1);
    block.take(&are_beams_alike, slot_count);
    block.take(&searches, slot_count);
    block.take(&passes, p.num_groups);
    block.take(&step, static_cast<int64_t>(beam::search_step_workspace_bytes(step_sizes(p))));
    block.take(&scores, candidates);
    block.take(&log_probs, candidates);
    block.take(&tokens, candidates);
    block.take(&beams, candidates);
    block.take(&decisions, candidates);
    block.take(&status, slot_count);
    block.take(&next_tokens, cache_rows);
    block.take(&next_parents, cache_rows);
    block.take(&nodes, cache_rows);
    parents.take(&block, p.state.beams, p.state.capacity);
    return block.used();
  }
};

class Decoding {
 public:
  Decoding(const DecodingParams& p, DecodingWorkspace workspace)
      : p_(p),
        state_(p.state),
        w_(workspace),
        forward_(p.config, p.weights, p.caches, DecodingWorkspace::max_rows(p), p.cache_rows(),
                 workspace.forward) {}

  int64_t run() {
    for (int64_t slot = 0; slot < state_.slots; ++slot) {
      w_.padding[slot] = p_.is_running(slot) ? p_.padding(slot) : 0;
      const beam::TokenTrie trie = p_.token_rules.trie(slot);
      if (p_.is_running(slot) && trie.tokens != nullptr) {
        find_trie_nodes(state_, p_.parameters, trie, slot, w_.nodes);
      }
    }
    read_prompts();
    int64_t steps = 0;
    while (steps < p_.max_steps && collect_rows() > 0) {
      forward_.run(/*to_logits=*/true);
      repeat_logits();
      if (p_.logits != nullptr) copy_logits();
      if (!p_.chooses && p_.scores == nullptr) return 1;
      choose();
      if (!p_.chooses) return 1;
      ++steps;
      if (p_.stop_when_done && has_ended()) break;
    }
    return steps;
  }

 private:
  // ---- rows

  // All tokens of new prompts but their last ones, which the first step reads: once a request, by
  // its first cache row, which all of its beams then look at.
  void read_prompts() {
    const int64_t most = DecodingWorkspace::max_rows(p_);
    forward_.clear();
    for (int64_t request = 0; request < p_.caches.requests; ++request) {
      const int64_t slot = request * p_.num_groups;
      if (!p_.is_running(slot)) continue;
      const int64_t first_row = slot * state_.beams;
      const int64_t prompt = state_.lengths[slot] - 1 - w_.padding[slot];
      const int64_t* const tokens =
          state_.sequences + first_row * state_.capacity + w_.padding[slot];
      for (int64_t& cached = p_.cached_lengths[request]; cached < prompt; ++cached) {
        forward_.add(first_row, cached, request, tokens[cached]);
        for (int64_t row = 1; row < p_.num_groups * state_.beams; ++row) {
          p_.caches.table[(first_row + row) * state_.capacity + cached] =
              static_cast<int32_t>(first_row);
        }
        if (forward_.count() < most) continue;
        forward_.run(/*to_logits=*/false);
        forward_.clear();
      }
    }
    if (forward_.count() > 0) forward_.run(/*to_logits=*/false);
  }

  // Whether the beams of a search have the same last token and look at the same keys before it, as
  // they do where it begins: their rows are the same.
  bool are_beams_alike(int64_t slot) const {
    const int64_t length = state_.lengths[slot], row = slot * state_.beams;
    if (length != p_.parameters.prompt_lengths[slot]) return false;
    const int64_t* const tokens = state_.sequences + row * state_.capacity;
    const int32_t* const table = p_.caches.table + row * state_.capacity;
    for (int64_t beam = 1; beam < p_.parameters.num_beams[slot]; ++beam) {
      const int64_t at = beam * state_.capacity;
      if (tokens[at + length - 1] != tokens[length - 1] ||
          !std::equal(table, table + length - 1 - w_.padding[slot], table + at)) {
        return false;
      }
    }
    return true;
  }

  // The rows of the searches that go on, group after group, of beams that are alike the first one
  // alone; returns how many.
  int64_t collect_rows() {
    forward_.clear();
    num_searches_ = 0;
    int64_t rows = 0;
    for (int64_t group = 0; group < p_.num_groups; ++group) {
      for (int64_t request = 0; request < p_.caches.requests; ++request) {
        const int64_t slot = request * p_.num_groups + group;
        if (!p_.is_running(slot)) {
          std::fill_n(w_.next_tokens + slot * state_.beams, state_.beams,
                      p_.parameters.pad_tokens[slot]);
          continue;
        }
        w_.slots[num_searches_] = slot;
        const int64_t beams = p_.parameters.num_beams[slot];
        const bool are_alike = are_beams_alike(slot);
        w_.are_beams_alike[num_searches_] = are_alike;
        w_.row_offsets[num_searches_++] = rows;
        rows += beams;
        const int64_t last = state_.lengths[slot] - 1, position = last - w_.padding[slot];
        const int64_t first_row = slot * state_.beams;
        for (int64_t beam = 0; beam < beams; ++beam) {
          const int64_t row = first_row + beam;
          if (beam == 0 || !are_alike) {
            forward_.add(row, position, request, state_.sequences[row * state_.capacity + last]);
          } else {
            p_.caches.table[row * state_.capacity + position] = static_cast<int32_t>(first_row);
          }
        }
        int64_t& cached = p_.cached_lengths[request];
        cached = std::max(cached, position + 1);
      }
    }
    w_.row_offsets[num_searches_] = rows;
    return rows;
  }

  // Spreads the logits of the computed rows to all beams, in place.
  void repeat_logits() {
    const int64_t vocab = p_.config.vocab;
    float* const logits = forward_.logits();
    int64_t row = forward_.count();
    for (int64_t search = num_searches_ - 1; search >= 0; --search) {
      const int64_t first = w_.row_offsets[search], end = w_.row_offsets[search + 1];
      row -= w_.are_beams_alike[search] != 0 ? 1 : end - first;
      for (int64_t to = end - 1; to >= first; --to) {
        const int64_t from = w_.are_beams_alike[search] != 0 ? row : row + to - first;
        if (from != to) std::copy_n(logits + from * vocab, vocab, logits + to * vocab);
      }
    }
  }

  void copy_logits() {
    const int64_t vocab = p_.config.vocab;
    for (int64_t search = 0; search < num_searches_; ++search) {
      const int64_t first = w_.row_offsets[search];
      std::copy_n(forward_.logits() + first * vocab, (w_.row_offsets[search + 1] - first) * vocab,
                  p_.logits + w_.slots[search] * state_.beams * vocab);
    }
  }

  // ---- the choice

  void choose() {
    beam::SearchStepParams step;
    step.state = state_;
    step.parameters = p_.parameters;
    step.token_rules = p_.token_rules;
    step.searches = w_.searches;
    step.count = num_searches_;
    step.passes = w_.passes;
    step.num_passes = p_.num_groups;
    step.num_candidates = p_.greedy ? 1 : p_.num_candidates;
    step.greedy = p_.greedy;
    step.fills_missing = true;
    step.logits = forward_.logits();
    step.rows = w_.row_offsets[num_searches_];
    step.vocab = step.logits_row_stride = p_.config.vocab;
    step.nodes = w_.nodes;
    step.ruled_scores = p_.scores;
    step.chooses = p_.chooses;
    step.next_rows = p_.cache_rows();
    step.next_tokens = w_.next_tokens;
    step.next_parents = w_.next_parents;
    step.scores = w_.scores;
    step.log_probs = w_.log_probs;
    step.tokens = w_.tokens;
    step.beams = w_.beams;
    step.decisions = w_.decisions;
    step.status = w_.status;
    for (int64_t group = 0; group < p_.num_groups; ++group) {
      w_.passes[group] = {0, 0, group * state_.beams};
    }
    for (int64_t i = 0; i < num_searches_; ++i) {
      const int64_t slot = w_.slots[i];
      const int64_t row = slot * state_.beams, beams = p_.parameters.num_beams[slot];
      beam::PassOfStep& pass = w_.passes[slot % p_.num_groups];
      w_.searches[i] = {slot,
                        slot,
                        static_cast<int64_t>(p_.dialect),
                        w_.row_offsets[i],
                        beams,
                        pass.rows,
                        row,
                        row + beams,
                        pass.num_earlier};
      pass.rows += beams;
      ++pass.searches;
      std::fill_n(w_.next_tokens + row + beams, state_.beams - beams, int64_t{-1});
    }
    search_step_cpu(step, DecodingWorkspace::step_sizes(p_), w_.step);
    if (!p_.chooses) return;
    for (int64_t i = 0; i < num_searches_; ++i) {
      const int64_t slot = w_.slots[i];
      if (p_.is_running(slot)) follow_parents(slot, w_.row_offsets[i]);
    }
  }

  void follow_parents(int64_t slot, int64_t first_row) {
    const int64_t row = slot * state_.beams, beams = p_.parameters.num_beams[slot];
    for (int64_t beam = 0; beam < beams; ++beam) {
      w_.parents.parents[beam] = static_cast<int32_t>(w_.next_parents[row + beam] - first_row);
    }
    w_.parents.follow(p_.caches, row, beams, state_.lengths[slot] - 1 - w_.padding[slot]);
  }

  bool has_ended() const {
    for (int64_t i = 0; i < num_searches_; ++i) {
      if (!p_.is_running(w_.slots[i])) return true;
    }
    return false;
  }

  const DecodingParams& p_;
  const beam::BeamSearchState& state_;
  const DecodingWorkspace w_;
  DecoderForward forward_;
  int64_t num_searches_ = 0;
};

}  // namespace

size_t decoding_workspace_bytes(const DecodingParams& params) {
  return DecodingWorkspace{}.split(params, nullptr);
}

int64_t decoding_steps_cpu(const DecodingParams& params) {
  DecodingWorkspace workspace{};
  workspace.split(params, params.workspace);
  const ScopedIeeeMode ieee;
  return Decoding(params, workspace).run();
}

}  // namespace lmdecode::decoder
