// A pass of a step of beam searches: the tables of its ops, and the work of a search before and
// after them. One code for the CPU and CUDA, where a block has a search.
#pragma once

#include "beam/beam_rules.h"
#include "beam/beam_step.h"
#include "beam/hypothesis_copies.h"
#include "beam/log_softmax_top_k.h"
#include "beam/logits_processors.h"
#include "beam/search_step.h"
#include "common/split_memory.h"

namespace lmdecode::beam {

// The rules that may be on in a pass.
struct RulesOfPass {
  bool looks_back = false;
  bool bans = false;
  bool forces = false;
  bool diverges = false;  // from earlier groups
  bool has_bias = false;
  bool has_bitmask = false;
  bool has_tries = false;

  bool any_but_tries() const {
    return looks_back || bans || forces || diverges || has_bias || has_bitmask;
  }
};

// The rules that a step has tensors of.
inline RulesOfPass possible_rules(const SearchStepParams& step, int64_t num_earlier) {
  const TokenRules& rules = step.token_rules;
  RulesOfPass on;
  on.looks_back = rules.repetition_penalty != nullptr || rules.no_repeat_ngram_size != nullptr;
  on.bans = rules.num_bans > 0;
  on.forces = rules.num_forced > 0;
  on.diverges = num_earlier > 0 && rules.diversity_penalty != nullptr;
  on.has_bias = rules.bias != nullptr;
  on.has_bitmask = step.token_bitmask != nullptr;
  on.has_tries = rules.trie_numbers != nullptr;
  return on;
}

// Inputs and outputs of log_softmax_top_k and beam_step in a pass, by its searches and their rows.
struct PassTables {
  int64_t* row_offsets;  // [searches + 1]: where the rows of each begin in the pass
  int64_t* logits_rows;  // [rows]: of each row of the pass
  int64_t* state_rows;   // [rows]: slot * beams + beam
  float* beam_scores;    // [rows]
  int32_t* nodes;        // [rows]
  int32_t* top_k_scratch;
  float* next_scores;  // [next_rows]
  int32_t* order;      // [searches, num_candidates]

  int64_t* lengths;               // [searches]
  float* repetition_penalty;      // [searches]
  int64_t* no_repeat_ngram_size;  // [searches]
  float* diversity_penalty;       // [searches]
  int64_t* diversity_tokens;      // [searches, num_earlier of the pass]
  int64_t* banned;                // [searches, num_bans]
  int64_t* forced;                // [searches]
  int64_t* rule_rows;             // [searches]
  TokenTrie* tries;               // [searches]

  // [rows] or null: the beam scores of rows that no trie holds, of others -inf.
  float* free_beam_scores = nullptr;

  void split(const SearchStepSizes& s, SplitMemory* block) {
    block->take(&row_offsets, s.searches + 1);
    block->take(&logits_rows, s.rows);
    block->take(&state_rows, s.rows);
    block->take(&beam_scores, s.rows);
    block->take(&nodes, s.rows);
    const int64_t row_candidates = s.num_candidates < s.vocab ? s.num_candidates : s.vocab;
    block->take(&top_k_scratch, LogSoftmaxTopKParams::scratch_size(s.rows, row_candidates));
    block->take(&next_scores, s.next_rows);
    block->take(&order, s.searches * s.num_candidates);
    block->take(&lengths, s.searches);
    block->take(&repetition_penalty, s.searches);
    block->take(&no_repeat_ngram_size, s.searches);
    block->take(&diversity_penalty, s.searches);
    block->take(&diversity_tokens, s.searches * s.num_earlier);
    block->take(&banned, s.searches * s.num_bans);
    block->take(&forced, s.searches);
    block->take(&rule_rows, s.searches);
    block->take(&tries, s.searches);
  }
};

struct SearchPass {
  SearchStepParams step;
  PassTables tables;
  int64_t begin = 0;  // of its searches
  int64_t count = 0;
  int64_t rows = 0;
  int64_t num_earlier = 0;

  // A search of the pass, its numbers within their ranges: CUDA cannot check them before the
  // launch. A slot below 0 is none.
  LMD_HOST_DEVICE SearchOfStep search(int64_t i) const {
    SearchOfStep s = step.searches[begin + i];
    if (s.slot >= step.state.slots) s.slot = -1;
    s.rule_row = clamped(s.rule_row, 0, step.token_rules.rows - 1);
    s.first_row = clamped(s.first_row, 0, step.rows - 1);
    const int64_t left = step.rows - s.first_row;
    s.num_rows = clamped(s.num_rows, 0, left < step.state.beams ? left : step.state.beams);
    s.pass_row = clamped(s.pass_row, 0, rows);
    s.next_row = clamped(s.next_row, 0, step.next_rows);
    s.next_end = clamped(s.next_end, s.next_row, step.next_rows);
    if (s.next_end > s.next_row + step.state.beams) s.next_end = s.next_row + step.state.beams;
    s.num_earlier = clamped(s.num_earlier, 0, s.next_row < num_earlier ? s.next_row : num_earlier);
    return s;
  }

  // The search that a row of the pass is of, if it is of any.
  LMD_HOST_DEVICE int64_t search_of_row(int64_t row) const {
    int64_t low = 0, high = count;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (step.searches[begin + middle].pass_row <= row ? low : high) = middle;
    }
    return low;
  }

  // ---- before the candidates

  // Writes the tables of a search: the first column numbers, all columns of lists theirs. Returns
  // the rules that are on, as far as these columns see them.
  LMD_HOST_DEVICE RulesOfPass write_search(int64_t i, Columns columns) const {
    const SearchOfStep s = search(i);
    const TokenRules& rules = step.token_rules;
    const int64_t row = s.rule_row, length = s.slot < 0 ? 0 : step.state.lengths[s.slot];
    const int64_t forced = rules.forced_token(row, length);
    RulesOfPass on;
    on.forces = forced >= 0;
    on.bans =
        rules.write_banned(row, length, on.forces, tables.banned + i * rules.num_bans, columns);
    on.diverges = s.num_earlier > 0;
    int64_t* const tokens = tables.diversity_tokens + i * num_earlier;
    for (int64_t at = columns.first; at < num_earlier; at += columns.step) {
      tokens[at] = at < s.num_earlier ? step.next_tokens[s.next_row - s.num_earlier + at] : -1;
    }
    const float penalty =
        rules.repetition_penalty == nullptr ? 1.0f : rules.repetition_penalty[row];
    const int64_t ngram =
        rules.no_repeat_ngram_size == nullptr ? 0 : rules.no_repeat_ngram_size[row];
    on.looks_back = penalty != 1.0f || ngram > 0;
    const TokenTrie trie = rules.trie(row);
    on.has_tries = trie.tokens != nullptr;
    if (columns.first != 0) return on;
    tables.row_offsets[i] = s.pass_row;
    if (i + 1 == count) tables.row_offsets[count] = rows;
    tables.lengths[i] = length;
    tables.repetition_penalty[i] = penalty;
    tables.no_repeat_ngram_size[i] = ngram;
    tables.diversity_penalty[i] =
        rules.diversity_penalty == nullptr ? 0.0f : rules.diversity_penalty[row];
    tables.forced[i] = forced;
    tables.rule_rows[i] = row;
    tables.tries[i] = trie;
    return on;
  }

  // Writes the tables of a row, of search i or of none.
  LMD_HOST_DEVICE void write_row(int64_t row, int64_t i) const {
    const SearchOfStep s = search(i);
    const int64_t beam = row - s.pass_row;
    const bool is_beam = s.slot >= 0 && beam >= 0 && beam < s.num_rows;
    const int64_t state_row = is_beam ? s.slot * step.state.beams + beam : 0;
    const float score = is_beam ? step.state.scores[state_row] : minus_infinity();
    tables.logits_rows[row] = is_beam ? s.first_row + beam : 0;
    tables.state_rows[row] = state_row;
    tables.beam_scores[row] = score;
    const bool has_tries = step.token_rules.trie_numbers != nullptr;
    tables.nodes[row] = has_tries && is_beam ? step.nodes[state_row] : kOffTrie;
    if (tables.free_beam_scores == nullptr) return;
    const bool is_held = step.token_rules.trie(s.rule_row).tokens != nullptr;
    tables.free_beam_scores[row] = is_held ? minus_infinity() : score;
  }

  LogitsProcessors processors(const RulesOfPass& on) const {
    using Tokens = TensorRows<int64_t>;
    const TokenRules& rules = step.token_rules;
    const BeamSearchState& state = step.state;
    LogitsProcessors to;
    to.lengths = {0, tables.lengths, 1};
    if (on.looks_back) {
      to.sequences = {state.sequences,    state.capacity,   state.capacity, 1,
                      Tokens::Per::kBeam, tables.state_rows};
      to.repetition_penalty = {1.0f, tables.repetition_penalty, 1};
      to.no_repeat_ngram_size = {0, tables.no_repeat_ngram_size, 1};
    }
    if (on.bans) {
      to.suppressed_tokens = {tables.banned, rules.num_bans, rules.num_bans, 1,
                              Tokens::Per::kRequest};
    }
    if (on.forces) to.forced_tokens = {tables.forced, 1, 1, 1, Tokens::Per::kRequest};
    if (on.diverges) {
      to.diversity_tokens = {tables.diversity_tokens, num_earlier, num_earlier, 1,
                             Tokens::Per::kRequest};
      to.diversity_penalty = {0.0f, tables.diversity_penalty, 1};
    }
    if (on.has_bias) {
      to.bias = {
          rules.bias,      step.vocab, rules.bias_stride, 1, TensorRows<float>::Per::kRequest,
          tables.rule_rows};
    }
    if (on.has_bitmask) {
      to.token_bitmask = {
          step.token_bitmask,  (step.vocab + 31) / 32,          step.bitmask_row_stride,
          step.bitmask_stride, TensorRows<int32_t>::Per::kBeam, tables.logits_rows};
    }
    if (on.has_tries) {
      to.tries = {{}, tables.tries, 1};
      to.nodes = tables.nodes;
    }
    return to;
  }

  LogSoftmaxTopKParams top_k() const {
    LogSoftmaxTopKParams top;
    top.rows = rows;
    top.vocab = step.vocab;
    top.requests = count;
    top.num_candidates = step.num_candidates;
    top.row_candidates = step.num_candidates < step.vocab ? step.num_candidates : step.vocab;
    top.logits = step.logits;
    top.dtype = step.dtype;
    top.logits_rows = tables.logits_rows;
    top.logits_row_stride = step.logits_row_stride;
    top.logits_vocab_stride = step.logits_vocab_stride;
    top.beam_scores = tables.beam_scores;
    top.beam_scores_stride = 1;
    top.row_offsets = tables.row_offsets;
    top.scratch = tables.top_k_scratch;
    const int64_t first = begin * step.num_candidates;
    top.scores = step.scores + first;
    top.tokens = step.tokens + first;
    top.beams = step.beams + first;
    top.status = step.status + begin;
    top.log_probs = step.log_probs + first;
    return top;
  }

  // ---- between candidates and next beams: the work of one thread

  LMD_HOST_DEVICE void complete_candidates(int64_t i) const {
    const SearchOfStep s = search(i);
    if (s.slot < 0) return;
    // A trie does without the beams that exist in name only.
    const int64_t beams = s.next_end - s.next_row;
    if (s.num_rows < beams && tables.tries[i].tokens == nullptr) add_unused_beams(i, beams);
    const bool is_scorer = s.dialect == static_cast<int64_t>(BeamDialect::kScorer);
    if (step.fills_missing && is_scorer) fill_missing_candidates(i, s.slot);
  }

  // A search of one row has num_beams equal ones, as transformers begins with, the scores of all
  // but the first at -1e9. Their candidates count where the first row has too few of its own: then
  // these are all tokens that it has. They stand by their scores, then beam, then token.
  LMD_HOST_DEVICE void add_unused_beams(int64_t i, int64_t num_beams) const {
    const int64_t k = step.num_candidates, first = (begin + i) * k;
    float *const scores = step.scores + first, *const log_probs = step.log_probs + first;
    int64_t *const tokens = step.tokens + first, *const beams = step.beams + first;
    int64_t have = 0;
    while (have < k && scores[have] > minus_infinity()) ++have;
    if (have == 0 || have == k) return;
    int32_t* const order = tables.order + i * k;  // by token
    for (int64_t at = 0; at < have; ++at) {
      int64_t place = at;
      for (; place > 0 && tokens[order[place - 1]] > tokens[at]; --place) {
        order[place] = order[place - 1];
      }
      order[place] = static_cast<int32_t>(at);
    }
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
      for (int64_t beam = 1; beam < num_beams && to < k; ++beam) {
        for (int64_t j = 0; j < have && to < k; ++j) {
          const int64_t from = order[j];
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

  LMD_HOST_DEVICE bool is_end_token(int64_t slot, int64_t token) const {
    const BeamSearchParameters& parameters = step.parameters;
    const int64_t ends = parameters.num_end_tokens;
    for (int64_t i = 0; i < ends; ++i) {
      if (parameters.end_tokens[slot * ends + i] == token) return true;
    }
    return false;
  }

  LMD_HOST_DEVICE void fill_missing_candidates(int64_t i, int64_t slot) const {
    int64_t no_end = 0;
    while (no_end + 1 < step.vocab && is_end_token(slot, no_end)) ++no_end;
    const int64_t first = (begin + i) * step.num_candidates;
    for (int64_t j = first; j < first + step.num_candidates; ++j) {
      if (step.scores[j] > minus_infinity()) continue;
      step.scores[j] = kMissingCandidateScore;
      step.tokens[j] = no_end;
    }
  }

  BeamStepParams beam_step() const {
    const int64_t k = step.num_candidates, first = begin * k;
    const SearchOfStep* const searches = step.searches + begin;
    constexpr int64_t kStride = sizeof(SearchOfStep) / sizeof(int64_t);
    BeamStepParams to;
    to.state = step.state;
    to.parameters = step.parameters;
    to.requests = count;
    to.num_candidates = k;
    to.rows = step.next_rows;
    to.scores = {step.scores + first, k, 1};
    to.tokens = {step.tokens + first, k, 1};
    to.beams = {step.beams + first, k, 1};
    to.log_probs = {step.log_probs + first, k, 1};
    to.status = {step.status + begin, 1, 0};
    if (step.bonus != nullptr) {
      to.bonus = {step.bonus + begin * step.state.beams, step.state.beams, 1};
    }
    to.slots = {&searches->slot, kStride, 0};
    to.own_dialects = {&searches->dialect, kStride, 0};
    to.offsets = {&searches->next_row, kStride, 0};
    to.ends = {&searches->next_end, kStride, 0};
    to.parents = {&searches->first_row, kStride, 0};
    to.next_scores = tables.next_scores;
    to.next_tokens = step.next_tokens;
    to.next_parents = step.next_parents;
    to.decisions = step.decisions + first;
    return to;
  }

  // ---- after the next beams

  LMD_HOST_DEVICE void end_search(int64_t i, Columns columns) const {
    const SearchOfStep s = search(i);
    const TokenTrie trie = s.slot < 0 ? TokenTrie{} : tables.tries[i];
    for (int64_t row = s.next_row + columns.first; row < s.next_end; row += columns.step) {
      // A placeholder beam, or a beam of a finished search, may name a row outside the pass.
      const int64_t last = s.num_rows > 0 ? s.num_rows - 1 : 0;
      const int64_t beam = clamped(step.next_parents[row] - s.first_row, 0, last);
      step.next_parents[row] = s.first_row + beam;
      if (trie.tokens == nullptr) continue;
      const int64_t parent = clamped(s.pass_row + beam, 0, rows - 1);
      step.nodes[s.slot * step.state.beams + row - s.next_row] =
          trie.child(tables.nodes[parent], step.next_tokens[row]);
    }
    if (step.ended == nullptr || columns.first != 0) return;
    step.ended[begin + i] = s.slot < 0                       ? 0
                            : step.state.status[s.slot] != 0 ? 2
                                                             : step.state.done[s.slot];
  }
};

}  // namespace lmdecode::beam
