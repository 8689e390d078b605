#include <algorithm>

#include "beam/beam_rules.h"
#include "beam/beam_step.h"
#include "beam/log_softmax_top_k.h"
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
      if (p_.is_running(slot) && trie_of(slot).tokens != nullptr) find_nodes(slot);
    }
    read_prompts();
    int64_t steps = 0;
    while (steps < p_.max_steps && collect_rows() > 0) {
      const int64_t searches = num_searches_;
      forward_.run(/*to_logits=*/true);
      repeat_logits();
      if (p_.logits != nullptr) copy_logits();
      if (!p_.chooses) return 1;
      for (int64_t begin = 0; begin < searches;) {
        const int64_t end = group_end(begin);
        choose(begin, end);
        begin = end;
      }
      ++steps;
      if (p_.stop_when_done && has_ended(searches)) break;
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

  beam::TokenTrie trie_of(int64_t slot) const {
    return p_.token_rules.tries == nullptr ? beam::TokenTrie{} : p_.token_rules.tries[slot];
  }

  // Where the beams of a search stand in its trie, from what they have generated.
  void find_nodes(int64_t slot) const {
    const int64_t prompt = p_.parameters.prompt_lengths[slot];
    for (int64_t beam = 0; beam < p_.parameters.num_beams[slot]; ++beam) {
      const int64_t row = slot * state_.beams + beam;
      w_.nodes[row] = trie_of(slot).find(state_.sequences + row * state_.capacity + prompt,
                                         state_.lengths[slot] - prompt);
    }
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
          std::fill_n(w_.chosen + slot * state_.beams, state_.beams,
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

  // ---- the choice; searches [begin, end) of the step, all of one group

  int64_t group_end(int64_t begin) const {
    const int64_t group = w_.slots[begin] % p_.num_groups;
    int64_t end = begin + 1;
    while (end < num_searches_ && w_.slots[end] % p_.num_groups == group) ++end;
    return end;
  }

  // Whether any rule is on for these searches; then their arguments.
  bool collect_processors(int64_t begin, int64_t end, beam::LogitsProcessors* to) const {
    const TokenRules& rules = p_.token_rules;
    const int64_t group = w_.slots[begin] % p_.num_groups, count = end - begin;
    const int64_t earlier = group * state_.beams;
    bool looks_back = false, bans = false, forces = false;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t slot = w_.slots[begin + i], length = state_.lengths[slot];
      w_.lengths[i] = length;
      w_.repetition_penalty[i] = rules.repetition_penalty[slot];
      w_.no_repeat_ngram_size[i] = rules.no_repeat_ngram_size[slot];
      w_.diversity_penalty[i] = rules.diversity_penalty[slot];
      looks_back |= w_.repetition_penalty[i] != 1.0f || w_.no_repeat_ngram_size[i] > 0;
      w_.forced[i] = -1;
      for (int64_t j = 0; j < rules.num_forced; ++j) {
        const int64_t* const forced = rules.forced + (slot * rules.num_forced + j) * 2;
        if (forced[0] == length) w_.forced[i] = forced[1];
      }
      forces |= w_.forced[i] >= 0;
      for (int64_t j = 0; j < rules.num_bans; ++j) {
        const int64_t* const ban = rules.bans + (slot * rules.num_bans + j) * 4;
        const bool holds =
            ban[1] <= length && length <= ban[2] && (w_.forced[i] < 0 || ban[3] != 0);
        w_.banned[i * rules.num_bans + j] = holds ? ban[0] : -1;
        bans |= holds;
      }
      std::copy_n(w_.chosen + (slot - group) * state_.beams, earlier,
                  w_.diversity_tokens + i * earlier);
    }
    using Tokens = beam::TensorRows<int64_t>;
    to->lengths = {0, w_.lengths, 1};
    if (looks_back) {
      copy_sequences(begin, end);
      to->sequences = {w_.sequences, state_.capacity, state_.capacity, 1, Tokens::Per::kBeam};
      to->repetition_penalty = {1.0f, w_.repetition_penalty, 1};
      to->no_repeat_ngram_size = {0, w_.no_repeat_ngram_size, 1};
    }
    if (bans) {
      to->suppressed_tokens = {w_.banned, rules.num_bans, rules.num_bans, 1, Tokens::Per::kRequest};
    }
    if (forces) to->forced_tokens = {w_.forced, 1, 1, 1, Tokens::Per::kRequest};
    if (earlier > 0) {
      to->diversity_tokens = {w_.diversity_tokens, earlier, earlier, 1, Tokens::Per::kRequest};
      to->diversity_penalty = {0.0f, w_.diversity_penalty, 1};
    }
    if (rules.bias != nullptr) {
      to->bias = {rules.bias, p_.config.vocab, 0, 1, beam::TensorRows<float>::Per::kCall};
    }
    const bool has_tries = collect_tries(begin, count, to);
    return looks_back || bans || forces || earlier > 0 || rules.bias != nullptr || has_tries;
  }

  // Whether any of these searches is held to a trie; then where its beams stand.
  bool collect_tries(int64_t begin, int64_t count, beam::LogitsProcessors* to) const {
    bool any = false;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t slot = w_.slots[begin + i], first = w_.pass_offsets[i];
      w_.tries[i] = trie_of(slot);
      any |= w_.tries[i].tokens != nullptr;
      if (w_.tries[i].tokens == nullptr) continue;
      std::copy_n(w_.nodes + slot * state_.beams, w_.pass_offsets[i + 1] - first,
                  w_.pass_nodes + first);
    }
    if (any) {
      to->tries = {{}, w_.tries, 1};
      to->nodes = w_.pass_nodes;
    }
    return any;
  }

  void copy_sequences(int64_t begin, int64_t end) const {
    for (int64_t search = begin; search < end; ++search) {
      const int64_t slot = w_.slots[search];
      const int64_t first = w_.row_offsets[search] - w_.row_offsets[begin];
      for (int64_t beam = 0; beam < p_.parameters.num_beams[slot]; ++beam) {
        std::copy_n(state_.sequences + (slot * state_.beams + beam) * state_.capacity,
                    state_.lengths[slot], w_.sequences + (first + beam) * state_.capacity);
      }
    }
  }

  TimestampRow timestamp_row(int64_t slot, int64_t beam) const {
    return {p_.token_rules.timestamp_rule(slot),
            state_.sequences + (slot * state_.beams + beam) * state_.capacity,
            state_.lengths[slot]};
  }

  // Whether the rule of timestamps is on for any of these searches; then what it allows.
  bool collect_allowed_tokens(int64_t begin, int64_t count, beam::LogitsProcessors* to) {
    const int64_t vocab = p_.config.vocab, words = (vocab + 31) / 32;
    bool any = false;
    for (int64_t i = 0; i < count; ++i) {
      any |= p_.token_rules.timestamp_rule(w_.slots[begin + i]).is_on();
    }
    if (!any) return false;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t first = w_.pass_offsets[i], rows = w_.pass_offsets[i + 1] - first;
      for (int64_t row = first; row < first + rows; ++row) {
        int32_t* const bitmask = w_.allowed_tokens + row * words;
        const TimestampRow timestamps = timestamp_row(w_.slots[begin + i], row - first);
        if (timestamps.rule.is_on()) {
          find_allowed(processors_of_row(*to, i, row, vocab), timestamps,
                       forward_.logits() + (w_.row_offsets[begin] + row) * vocab, w_.row_values,
                       vocab, DecodingWorkspace::max_edits(p_), w_.edits, bitmask);
        } else {
          std::fill_n(bitmask, words, -1);
        }
      }
    }
    to->token_bitmask = {w_.allowed_tokens, words, words, 1, beam::TensorRows<int32_t>::Per::kBeam};
    return true;
  }

  void write_beam_scores(int64_t begin, int64_t count, const beam::LogitsProcessors& processors) {
    const int64_t vocab = p_.config.vocab;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t slot = w_.slots[begin + i], first = w_.pass_offsets[i];
      for (int64_t row = first; row < w_.pass_offsets[i + 1]; ++row) {
        write_scores(processors_of_row(processors, i, row, vocab), timestamp_row(slot, row - first),
                     forward_.logits() + (w_.row_offsets[begin] + row) * vocab,
                     p_.scores + (slot * state_.beams + row - first) * vocab, vocab,
                     DecodingWorkspace::max_edits(p_), w_.edits);
      }
    }
  }

  void choose(int64_t begin, int64_t end) {
    const int64_t count = end - begin, first_row = w_.row_offsets[begin];
    for (int64_t i = 0; i <= count; ++i) {
      w_.pass_offsets[i] = w_.row_offsets[begin + i] - first_row;
    }
    beam::LogitsProcessors processors;
    bool processed = collect_processors(begin, end, &processors);
    if (p_.greedy) {
      choose_greedy_tokens(begin, count, processors);
    } else {
      if (p_.scores != nullptr) write_beam_scores(begin, count, processors);
      processed |= collect_allowed_tokens(begin, count, &processors);
      choose_candidates(begin, count, processed ? &processors : nullptr);
    }
    advance(begin, count);
  }

  void choose_greedy_tokens(int64_t begin, int64_t count,
                            const beam::LogitsProcessors& processors) {
    const int64_t vocab = p_.config.vocab;
    const int64_t max_edits = DecodingWorkspace::max_edits(p_);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = w_.row_offsets[begin + i];
      const GreedyChoice choice = choose_greedily(
          processors_of_row(processors, i, i, vocab), timestamp_row(w_.slots[begin + i], 0),
          forward_.logits() + row * vocab, vocab, max_edits, w_.edits);
      if (p_.scores != nullptr) {
        std::copy_n(forward_.logits() + row * vocab, vocab,
                    p_.scores + w_.slots[begin + i] * state_.beams * vocab);
      }
      w_.status[i] = choice.status;
      w_.tokens[i] = choice.token;
      w_.beams[i] = 0;
      w_.log_probs[i] = choice.log_prob;
      w_.scores[i] = choice.status != 0
                         ? minus_infinity()
                         : state_.scores[w_.slots[begin + i] * state_.beams] + choice.log_prob;
    }
  }

  void choose_candidates(int64_t begin, int64_t count, const beam::LogitsProcessors* processors) {
    for (int64_t i = 0; i < count; ++i) {
      std::copy_n(state_.scores + w_.slots[begin + i] * state_.beams,
                  w_.pass_offsets[i + 1] - w_.pass_offsets[i], w_.beam_scores + w_.pass_offsets[i]);
    }
    beam::LogSoftmaxTopKParams top;
    top.rows = w_.pass_offsets[count];
    top.vocab = p_.config.vocab;
    top.requests = count;
    top.num_candidates = p_.num_candidates;
    top.row_candidates = std::min(p_.num_candidates, top.vocab);
    top.logits = forward_.logits() + w_.row_offsets[begin] * top.vocab;
    top.logits_row_stride = top.vocab;
    top.beam_scores = w_.beam_scores;
    top.beam_scores_stride = 1;
    top.row_offsets = w_.pass_offsets;
    top.scratch = w_.top_k_scratch;
    top.scores = w_.scores;
    top.tokens = w_.tokens;
    top.beams = w_.beams;
    top.status = w_.status;
    top.log_probs = w_.log_probs;
    log_softmax_top_k_cpu(top, processors);
    if (p_.rules == beam::BeamRules::kScorer) fill_missing_candidates(begin, count);
  }

  void fill_missing_candidates(int64_t begin, int64_t count) const {
    const int64_t ends = p_.parameters.num_end_tokens;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t* const end_tokens = p_.parameters.end_tokens + w_.slots[begin + i] * ends;
      int64_t no_end = 0;
      while (no_end + 1 < p_.config.vocab &&
             std::find(end_tokens, end_tokens + ends, no_end) != end_tokens + ends) {
        ++no_end;
      }
      for (int64_t j = i * p_.num_candidates; j < (i + 1) * p_.num_candidates; ++j) {
        if (w_.scores[j] > minus_infinity()) continue;
        w_.scores[j] = beam::kMissingCandidateScore;
        w_.tokens[j] = no_end;
      }
    }
  }

  void advance(int64_t begin, int64_t count) {
    const int64_t candidates = p_.greedy ? 1 : p_.num_candidates;
    beam::BeamStepParams step;
    step.state = state_;
    step.parameters = p_.parameters;
    step.rules = p_.rules;
    step.requests = count;
    step.num_candidates = candidates;
    step.rows = w_.pass_offsets[count];
    step.scores = {w_.scores, candidates, 1};
    step.tokens = {w_.tokens, candidates, 1};
    step.beams = {w_.beams, candidates, 1};
    step.log_probs = {w_.log_probs, candidates, 1};
    step.status = {w_.status, 1, 0};
    step.slots = {w_.slots + begin, 1, 0};
    step.offsets = {w_.pass_offsets, 1, 0};
    step.next_scores = w_.next_scores;
    step.next_tokens = w_.next_tokens;
    step.next_parents = w_.next_parents;
    step.decisions = w_.decisions;
    beam_step_cpu(step);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t slot = w_.slots[begin + i], first = w_.pass_offsets[i];
      const int64_t beams = w_.pass_offsets[i + 1] - first;
      std::copy_n(w_.next_tokens + first, beams, w_.chosen + slot * state_.beams);
      std::fill_n(w_.chosen + slot * state_.beams + beams, state_.beams - beams, int64_t{-1});
      if (!p_.is_running(slot)) continue;
      follow_parents(slot, w_.next_parents + first, first, beams);
      const beam::TokenTrie trie = trie_of(slot);
      for (int64_t row = first; trie.tokens != nullptr && row < first + beams; ++row) {
        w_.nodes[slot * state_.beams + row - first] =
            trie.child(w_.pass_nodes[w_.next_parents[row]], w_.next_tokens[row]);
      }
    }
  }

  void follow_parents(int64_t slot, const int64_t* next_parents, int64_t first, int64_t beams) {
    for (int64_t beam = 0; beam < beams; ++beam) {
      w_.parents.parents[beam] = static_cast<int32_t>(next_parents[beam] - first);
    }
    w_.parents.follow(p_.caches, slot * state_.beams, beams,
                      state_.lengths[slot] - 1 - w_.padding[slot]);
  }

  bool has_ended(int64_t searches) const {
    for (int64_t i = 0; i < searches; ++i) {
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
