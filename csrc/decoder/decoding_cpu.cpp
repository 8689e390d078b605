#include <algorithm>

#include "beam/search_step.h"
#include "common/float_mode.h"
#include "decoder/decoding.h"
#include "decoder/decoding_workspace.h"

namespace lmdecode::decoder {
namespace {

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

  // From the logits of the rows that were computed to those of all beams, in place.
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
                        static_cast<int64_t>(p_.rules),
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
