#include <algorithm>

#include "beam/beam_rules.h"
#include "beam/beam_step.h"
#include "beam/greedy_choice.h"
#include "beam/log_softmax_top_k.h"
#include "beam/search_step.h"
#include "common/split_memory.h"

namespace lmdecode::beam {
namespace {

// What log_softmax_top_k and beam_step read and write in a pass, by the searches of the pass and
// their rows.
struct Workspace {
  int64_t* row_offsets;   // [searches + 1]: where the rows of each begin in the pass
  int64_t* next_offsets;  // [searches + 1]: and its next beams
  int64_t* first_rows;    // [searches]: of the logits
  int64_t* slots;         // [searches]
  int64_t* logits_rows;   // [rows]: of each row of the pass
  int64_t* state_rows;    // [rows]: slot * beams + beam
  float* beam_scores;     // [rows]
  int32_t* top_k_scratch;
  float* next_scores;     // [rows]
  int64_t* next_tokens;   // [rows]
  int64_t* next_parents;  // [rows]

  int64_t* lengths;               // [searches]
  float* repetition_penalty;      // [searches]
  int64_t* no_repeat_ngram_size;  // [searches]
  float* diversity_penalty;       // [searches]
  int64_t* diversity_tokens;      // [searches, num_earlier]
  int64_t* banned;                // [searches, num_bans]
  int64_t* forced;                // [searches]
  int64_t* rule_rows;             // [searches]
  TokenTrie* tries;               // [searches]
  int32_t* pass_nodes;            // [rows]
  unsigned char* edits;           // of one row, where it is row by row
  float* row_values;              // [vocab], likewise
  int32_t* allowed_tokens;        // [rows, ceil(vocab / 32)], likewise
  int64_t* token_order;           // [num_candidates]

  // The most tokens of a row that rules name one by one.
  static int64_t max_edits(const SearchStepSizes& s) {
    return s.capacity + s.num_bans + s.num_earlier;
  }

  // With null for the memory it only counts. Returns the bytes.
  size_t split(const SearchStepSizes& s, void* memory) {
    SplitMemory block(memory);
    block.take(&row_offsets, s.searches + 1);
    block.take(&next_offsets, s.searches + 1);
    block.take(&first_rows, s.searches);
    block.take(&slots, s.searches);
    block.take(&logits_rows, s.rows);
    block.take(&state_rows, s.rows);
    block.take(&beam_scores, s.rows);
    block.take(&top_k_scratch,
               LogSoftmaxTopKParams::scratch_size(s.rows, std::min(s.num_candidates, s.vocab)));
    block.take(&next_scores, s.rows);
    block.take(&next_tokens, s.rows);
    block.take(&next_parents, s.rows);
    block.take(&lengths, s.searches);
    block.take(&repetition_penalty, s.searches);
    block.take(&no_repeat_ngram_size, s.searches);
    block.take(&diversity_penalty, s.searches);
    block.take(&diversity_tokens, s.searches * s.num_earlier);
    block.take(&banned, s.searches * s.num_bans);
    block.take(&forced, s.searches);
    block.take(&rule_rows, s.searches);
    block.take(&tries, s.searches);
    block.take(&pass_nodes, s.rows);
    const int64_t edit_bytes = static_cast<int64_t>(greedy_edit_bytes(max_edits(s), s.vocab));
    block.take(&edits, s.is_row_by_row ? edit_bytes : 0);
    block.take(&row_values, s.is_row_by_row ? s.vocab : 0);
    block.take(&allowed_tokens, s.is_row_by_row ? s.rows * ((s.vocab + 31) / 32) : 0);
    block.take(&token_order, s.num_candidates);
    return block.used();
  }
};

class SearchStep {
 public:
  SearchStep(const SearchStepParams& p, const SearchStepSizes& sizes, const Workspace& w)
      : p_(p), state_(p.state), w_(w), max_edits_(Workspace::max_edits(sizes)) {}

  void run() {
    for (int64_t begin = 0; begin < p_.count;) {
      int64_t end = begin + 1;
      while (end < p_.count && p_.searches[end].group == p_.searches[begin].group &&
             p_.searches[end].rules == p_.searches[begin].rules) {
        ++end;
      }
      begin_ = begin;
      count_ = end - begin;
      choose();
      begin = end;
    }
  }

 private:
  const SearchOfStep& search(int64_t i) const { return p_.searches[begin_ + i]; }
  int64_t num_beams(int64_t i) const { return p_.parameters.num_beams[search(i).slot]; }
  BeamRules rules() const { return static_cast<BeamRules>(search(0).rules); }

  void choose() {
    collect_rows();
    LogitsProcessors processors;
    bool processed = collect_processors(&processors);
    if (!p_.chooses) return write_beam_scores(processors);
    if (p_.greedy) {
      choose_greedy_tokens(processors);
    } else {
      if (p_.ruled_scores != nullptr) write_beam_scores(processors);
      processed |= collect_allowed_tokens(&processors);
      choose_candidates(processed ? &processors : nullptr);
    }
    advance();
  }

  void collect_rows() {
    int64_t row = 0, next = 0;
    for (int64_t i = 0; i < count_; ++i) {
      const SearchOfStep& s = search(i);
      w_.row_offsets[i] = row;
      w_.next_offsets[i] = next;
      w_.first_rows[i] = s.first_row;
      w_.slots[i] = s.slot;
      for (int64_t beam = 0; beam < s.num_rows; ++beam, ++row) {
        w_.logits_rows[row] = s.first_row + beam;
        w_.state_rows[row] = s.slot * state_.beams + beam;
        w_.beam_scores[row] = state_.scores[w_.state_rows[row]];
      }
      next += num_beams(i);
    }
    w_.row_offsets[count_] = row;
    w_.next_offsets[count_] = next;
  }

  // ---- the rules

  // Whether any rule is on for these searches; then their arguments.
  bool collect_processors(LogitsProcessors* to) const {
    const TokenRules& rules = p_.token_rules;
    bool looks_back = false, bans = false, forces = false;
    int64_t most_earlier = 0;
    for (int64_t i = 0; i < count_; ++i) {
      const int64_t row = search(i).rule_row, length = state_.lengths[search(i).slot];
      w_.rule_rows[i] = row;
      w_.lengths[i] = length;
      w_.repetition_penalty[i] = rules.repetition_penalty[row];
      w_.no_repeat_ngram_size[i] = rules.no_repeat_ngram_size[row];
      w_.diversity_penalty[i] = rules.diversity_penalty[row];
      looks_back |= w_.repetition_penalty[i] != 1.0f || w_.no_repeat_ngram_size[i] > 0;
      w_.forced[i] = rules.forced_token(row, length);
      forces |= w_.forced[i] >= 0;
      bans |= rules.write_banned(row, length, w_.forced[i] >= 0, w_.banned + i * rules.num_bans);
      most_earlier = std::max(most_earlier, search(i).num_earlier);
    }
    using Tokens = TensorRows<int64_t>;
    to->lengths = {0, w_.lengths, 1};
    if (looks_back) {
      to->sequences = {state_.sequences,   state_.capacity, state_.capacity, 1,
                       Tokens::Per::kBeam, w_.state_rows};
      to->repetition_penalty = {1.0f, w_.repetition_penalty, 1};
      to->no_repeat_ngram_size = {0, w_.no_repeat_ngram_size, 1};
    }
    if (bans) {
      to->suppressed_tokens = {w_.banned, rules.num_bans, rules.num_bans, 1, Tokens::Per::kRequest};
    }
    if (forces) to->forced_tokens = {w_.forced, 1, 1, 1, Tokens::Per::kRequest};
    if (most_earlier > 0) collect_earlier(most_earlier, to);
    if (rules.bias != nullptr) {
      to->bias = {rules.bias,  p_.vocab, rules.bias_stride, 1, TensorRows<float>::Per::kRequest,
                  w_.rule_rows};
    }
    if (p_.token_bitmask != nullptr) {
      to->token_bitmask = {p_.token_bitmask,
                           (p_.vocab + 31) / 32,
                           p_.bitmask_row_stride,
                           p_.bitmask_stride,
                           TensorRows<int32_t>::Per::kBeam,
                           w_.logits_rows};
    }
    const bool has_tries = collect_tries(to);
    return looks_back || bans || forces || most_earlier > 0 || rules.bias != nullptr ||
           p_.token_bitmask != nullptr || has_tries;
  }

  // What earlier groups chose in this step.
  void collect_earlier(int64_t most, LogitsProcessors* to) const {
    for (int64_t i = 0; i < count_; ++i) {
      const SearchOfStep& s = search(i);
      int64_t* const tokens = w_.diversity_tokens + i * most;
      std::copy_n(p_.next_tokens + s.next_row - s.num_earlier, s.num_earlier, tokens);
      std::fill_n(tokens + s.num_earlier, most - s.num_earlier, int64_t{-1});
    }
    to->diversity_tokens = {w_.diversity_tokens, most, most, 1, TensorRows<int64_t>::Per::kRequest};
    to->diversity_penalty = {0.0f, w_.diversity_penalty, 1};
  }

  // Whether any of these searches is held to a trie; then where its beams stand.
  bool collect_tries(LogitsProcessors* to) const {
    bool any = false;
    for (int64_t i = 0; i < count_; ++i) {
      w_.tries[i] = p_.token_rules.trie(search(i).rule_row);
      any |= w_.tries[i].tokens != nullptr;
    }
    if (!any) return false;
    for (int64_t row = 0; row < w_.row_offsets[count_]; ++row) {
      w_.pass_nodes[row] = p_.nodes[w_.state_rows[row]];
    }
    to->tries = {{}, w_.tries, 1};
    to->nodes = w_.pass_nodes;
    return true;
  }

  // ---- f32 rows, one by one: where it is greedy, or a rule of timestamps is on

  float* row_logits(int64_t row) const {
    return static_cast<float*>(p_.logits) + w_.logits_rows[row] * p_.logits_row_stride;
  }

  TimestampRow timestamp_row(int64_t i, int64_t row) const {
    const int64_t slot = search(i).slot;
    return {p_.token_rules.timestamp_rule(search(i).rule_row),
            state_.sequences + w_.state_rows[row] * state_.capacity, state_.lengths[slot]};
  }

  // Whether the rule of timestamps is on for any of these searches; then what it allows.
  bool collect_allowed_tokens(LogitsProcessors* to) const {
    bool any = false;
    for (int64_t i = 0; i < count_; ++i) {
      any |= p_.token_rules.timestamp_rule(search(i).rule_row).is_on();
    }
    if (!any) return false;
    const int64_t words = (p_.vocab + 31) / 32;
    for (int64_t i = 0; i < count_; ++i) {
      for (int64_t row = w_.row_offsets[i]; row < w_.row_offsets[i + 1]; ++row) {
        int32_t* const bitmask = w_.allowed_tokens + row * words;
        const TimestampRow timestamps = timestamp_row(i, row);
        if (timestamps.rule.is_on()) {
          find_allowed(processors_of_row(*to, i, row, p_.vocab), timestamps, row_logits(row),
                       w_.row_values, p_.vocab, max_edits_, w_.edits, bitmask);
        } else {
          std::fill_n(bitmask, words, -1);
        }
      }
    }
    to->token_bitmask = {w_.allowed_tokens, words, words, 1, TensorRows<int32_t>::Per::kBeam};
    return true;
  }

  void write_beam_scores(const LogitsProcessors& processors) const {
    for (int64_t i = 0; i < count_; ++i) {
      for (int64_t row = w_.row_offsets[i]; row < w_.row_offsets[i + 1]; ++row) {
        write_scores(processors_of_row(processors, i, row, p_.vocab), timestamp_row(i, row),
                     row_logits(row), p_.ruled_scores + w_.state_rows[row] * p_.vocab, p_.vocab,
                     max_edits_, w_.edits);
      }
    }
  }

  void choose_greedy_tokens(const LogitsProcessors& processors) const {
    for (int64_t i = 0; i < count_; ++i) {
      const int64_t at = begin_ + i;
      float* const logits = row_logits(i);
      const GreedyChoice choice =
          choose_greedily(processors_of_row(processors, i, i, p_.vocab), timestamp_row(i, i),
                          logits, p_.vocab, max_edits_, w_.edits);
      if (p_.ruled_scores != nullptr) {
        std::copy_n(logits, p_.vocab, p_.ruled_scores + w_.state_rows[i] * p_.vocab);
      }
      p_.status[at] = choice.status;
      p_.tokens[at] = choice.token;
      p_.beams[at] = 0;
      p_.log_probs[at] = choice.log_prob;
      p_.scores[at] = choice.status != 0 ? minus_infinity() : w_.beam_scores[i] + choice.log_prob;
    }
  }

  // ---- candidates

  void choose_candidates(const LogitsProcessors* processors) const {
    LogSoftmaxTopKParams top;
    top.rows = w_.row_offsets[count_];
    top.vocab = p_.vocab;
    top.requests = count_;
    top.num_candidates = p_.num_candidates;
    top.row_candidates = std::min(p_.num_candidates, top.vocab);
    top.logits = p_.logits;
    top.dtype = p_.dtype;
    top.logits_rows = w_.logits_rows;
    top.logits_row_stride = p_.logits_row_stride;
    top.logits_vocab_stride = p_.logits_vocab_stride;
    top.beam_scores = w_.beam_scores;
    top.beam_scores_stride = 1;
    top.row_offsets = w_.row_offsets;
    top.scratch = w_.top_k_scratch;
    const int64_t first = begin_ * p_.num_candidates;
    top.scores = p_.scores + first;
    top.tokens = p_.tokens + first;
    top.beams = p_.beams + first;
    top.status = p_.status + begin_;
    top.log_probs = p_.log_probs + first;
    log_softmax_top_k_cpu(top, processors);
    for (int64_t i = 0; i < count_; ++i) {
      // A trie does without the beams that exist in name only.
      const bool is_held = processors != nullptr && processors->tries.at(i).tokens != nullptr;
      if (search(i).num_rows < num_beams(i) && !is_held) add_unused_beams(i);
    }
    if (p_.fills_missing && rules() == BeamRules::kScorer) fill_missing_candidates();
  }

  // A search of one row has num_beams equal ones, as transformers begins with, the scores of all
  // but the first at -1e9. Their candidates count where the first row has too few of its own: then
  // these are all tokens that it has. They stand by their scores, then beam, then token.
  void add_unused_beams(int64_t i) const {
    const int64_t k = p_.num_candidates, first = (begin_ + i) * k;
    float *const scores = p_.scores + first, *const log_probs = p_.log_probs + first;
    int64_t *const tokens = p_.tokens + first, *const beams = p_.beams + first;
    int64_t have = 0;
    while (have < k && scores[have] > minus_infinity()) w_.token_order[have] = have, ++have;
    if (have == 0 || have == k) return;
    std::sort(w_.token_order, w_.token_order + have,
              [&](int64_t a, int64_t b) { return tokens[a] < tokens[b]; });
    const auto score_of = [&](int64_t at) { return log_probs[at] + kUnusedBeamScore; };
    // The next score of them all in falling order, as often as it is there.
    float bound = plus_infinity();
    for (int64_t to = have; to < k;) {
      float score = minus_infinity();
      for (int64_t j = 0; j < have; ++j) {
        const float other = score_of(j);
        if (other < bound && other > score) score = other;
      }
      if (!(score > minus_infinity())) break;
      for (int64_t beam = 1; beam < num_beams(i) && to < k; ++beam) {
        for (int64_t j = 0; j < have && to < k; ++j) {
          const int64_t from = w_.token_order[j];
          if (score_of(from) != score) continue;
          scores[to] = score;
          tokens[to] = tokens[from];
          beams[to] = beam;
          log_probs[to++] = log_probs[from];
        }
      }
      bound = score;
    }
  }

  void fill_missing_candidates() const {
    const int64_t ends = p_.parameters.num_end_tokens;
    for (int64_t i = 0; i < count_; ++i) {
      const int64_t* const end_tokens = p_.parameters.end_tokens + search(i).slot * ends;
      int64_t no_end = 0;
      while (no_end + 1 < p_.vocab &&
             std::find(end_tokens, end_tokens + ends, no_end) != end_tokens + ends) {
        ++no_end;
      }
      const int64_t first = (begin_ + i) * p_.num_candidates;
      for (int64_t j = first; j < first + p_.num_candidates; ++j) {
        if (p_.scores[j] > minus_infinity()) continue;
        p_.scores[j] = kMissingCandidateScore;
        p_.tokens[j] = no_end;
      }
    }
  }

  // ---- the next beams

  void advance() const {
    const int64_t candidates = p_.num_candidates, first = begin_ * candidates;
    BeamStepParams step;
    step.state = state_;
    step.parameters = p_.parameters;
    step.rules = rules();
    step.requests = count_;
    step.num_candidates = candidates;
    step.rows = w_.next_offsets[count_];
    step.scores = {p_.scores + first, candidates, 1};
    step.tokens = {p_.tokens + first, candidates, 1};
    step.beams = {p_.beams + first, candidates, 1};
    step.log_probs = {p_.log_probs + first, candidates, 1};
    step.status = {p_.status + begin_, 1, 0};
    if (p_.bonus != nullptr) {
      step.bonus = {p_.bonus + begin_ * state_.beams, state_.beams, 1};
    }
    step.slots = {w_.slots, 1, 0};
    step.offsets = {w_.next_offsets, 1, 0};
    step.parents = {w_.first_rows, 1, 0};
    step.parent_count = count_;
    step.next_scores = w_.next_scores;
    step.next_tokens = w_.next_tokens;
    step.next_parents = w_.next_parents;
    step.decisions = p_.decisions + first;
    beam_step_cpu(step);
    for (int64_t i = 0; i < count_; ++i) {
      const SearchOfStep& s = search(i);
      const int64_t begin = w_.next_offsets[i], beams = w_.next_offsets[i + 1] - begin;
      std::copy_n(w_.next_tokens + begin, beams, p_.next_tokens + s.next_row);
      // A beam that exists in name only, or whose search is done, may name a row that it has not.
      for (int64_t beam = 0; beam < beams; ++beam) {
        p_.next_parents[s.next_row + beam] =
            std::clamp(w_.next_parents[begin + beam], s.first_row, s.first_row + s.num_rows - 1);
      }
      follow_trie(i);
    }
  }

  void follow_trie(int64_t i) const {
    const SearchOfStep& s = search(i);
    const TokenTrie trie = p_.token_rules.trie(s.rule_row);
    if (trie.tokens == nullptr) return;
    const int32_t* const nodes = w_.pass_nodes + w_.row_offsets[i];
    for (int64_t beam = 0; beam < num_beams(i); ++beam) {
      const int64_t row = s.next_row + beam;
      p_.nodes[s.slot * state_.beams + beam] =
          trie.child(nodes[p_.next_parents[row] - s.first_row], p_.next_tokens[row]);
    }
  }

  const SearchStepParams& p_;
  const BeamSearchState& state_;
  const Workspace& w_;
  const int64_t max_edits_;
  int64_t begin_ = 0, count_ = 0;  // the searches of the pass
};

}  // namespace

size_t search_step_workspace_bytes(const SearchStepSizes& sizes) {
  return Workspace{}.split(sizes, nullptr);
}

void find_trie_nodes(const BeamSearchState& state, const BeamSearchParameters& parameters,
                     const TokenTrie& trie, int64_t slot, int32_t* nodes) {
  const int64_t prompt = parameters.prompt_lengths[slot];
  for (int64_t beam = 0; beam < parameters.num_beams[slot]; ++beam) {
    const int64_t row = slot * state.beams + beam;
    nodes[row] =
        trie.find(state.sequences + row * state.capacity + prompt, state.lengths[slot] - prompt);
  }
}

void search_step_cpu(const SearchStepParams& params, const SearchStepSizes& sizes,
                     void* workspace) {
  Workspace w{};
  w.split(sizes, workspace);
  SearchStep(params, sizes, w).run();
}

}  // namespace lmdecode::beam
