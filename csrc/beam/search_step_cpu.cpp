#include <algorithm>

#include "beam/beam_step.h"
#include "beam/greedy_choice.h"
#include "beam/log_softmax_top_k.h"
#include "beam/search_pass.h"

namespace lmdecode::beam {
namespace {

// A pass's tables, and the CPU's additional scratch.
struct Workspace : PassTables {
  unsigned char* edits;     // of one row, where it is row by row
  float* row_values;        // [vocab], likewise
  int32_t* allowed_tokens;  // [rows, ceil(vocab / 32)], likewise

  // The most tokens of a row that rules edit one by one.
  static int64_t max_edits(const SearchStepSizes& s) {
    return s.capacity + s.num_bans + s.num_earlier;
  }

  // With null for the memory it only counts. Returns the bytes.
  size_t split(const SearchStepSizes& s, void* memory) {
    SplitMemory block(memory);
    PassTables::split(s, &block);
    const int64_t edit_bytes = static_cast<int64_t>(greedy_edit_bytes(max_edits(s), s.vocab));
    block.take(&edits, s.is_row_by_row ? edit_bytes : 0);
    block.take(&row_values, s.is_row_by_row ? s.vocab : 0);
    block.take(&allowed_tokens, s.is_row_by_row ? s.rows * ((s.vocab + 31) / 32) : 0);
    return block.used();
  }
};

class SearchStep {
 public:
  SearchStep(const SearchStepParams& p, const SearchStepSizes& sizes, const Workspace& w)
      : p_(p), state_(p.state), w_(w), max_edits_(Workspace::max_edits(sizes)), pass_{p, w} {}

  void run() {
    for (int64_t i = 0; i < p_.num_passes; ++i) {
      const PassOfStep& pass = p_.passes[i];
      pass_.count = pass.searches;
      pass_.rows = pass.rows;
      pass_.num_earlier = pass.num_earlier;
      if (pass.searches > 0) choose();
      pass_.begin += pass.searches;
    }
  }

 private:
  int64_t count() const { return pass_.count; }
  const SearchOfStep& search(int64_t i) const { return p_.searches[pass_.begin + i]; }

  void choose() {
    const RulesOfPass on = write_tables();
    LogitsProcessors processors = pass_.processors(on);
    if (!p_.chooses) return write_beam_scores(processors);
    if (p_.greedy) {
      choose_greedy_tokens(processors);
    } else {
      if (p_.ruled_scores != nullptr) write_beam_scores(processors);
      const bool times = collect_allowed_tokens(&processors);
      const bool processed = on.any_but_tries() || on.has_tries || times;
      log_softmax_top_k_cpu(pass_.top_k(), processed ? &processors : nullptr);
      for (int64_t i = 0; i < count(); ++i) pass_.complete_candidates(i);
    }
    beam_step_cpu(pass_.beam_step());
    for (int64_t i = 0; i < count(); ++i) pass_.end_search(i, {});
  }

  // Returns the rules that are on at the lengths of these searches.
  RulesOfPass write_tables() const {
    RulesOfPass on;
    on.has_bias = p_.token_rules.bias != nullptr;
    on.has_bitmask = p_.token_bitmask != nullptr;
    for (int64_t i = 0; i < count(); ++i) {
      const RulesOfPass of_search = pass_.write_search(i, {});
      on.looks_back |= of_search.looks_back;
      on.bans |= of_search.bans;
      on.forces |= of_search.forces;
      on.diverges |= of_search.diverges;
      on.has_tries |= of_search.has_tries;
      const int64_t first = search(i).pass_row;
      for (int64_t row = first; row < first + search(i).num_rows; ++row) pass_.write_row(row, i);
    }
    return on;
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

  // Whether the timestamp rule is on for any of these searches; then sets the tokens that it
  // allows.
  bool collect_allowed_tokens(LogitsProcessors* to) const {
    bool any = false;
    for (int64_t i = 0; i < count(); ++i) {
      any |= p_.token_rules.timestamp_rule(search(i).rule_row).is_on();
    }
    if (!any) return false;
    const int64_t words = (p_.vocab + 31) / 32;
    for (int64_t i = 0; i < count(); ++i) {
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
    for (int64_t i = 0; i < count(); ++i) {
      for (int64_t row = w_.row_offsets[i]; row < w_.row_offsets[i + 1]; ++row) {
        write_scores(processors_of_row(processors, i, row, p_.vocab), timestamp_row(i, row),
                     row_logits(row), p_.ruled_scores + w_.state_rows[row] * p_.vocab, p_.vocab,
                     max_edits_, w_.edits);
      }
    }
  }

  void choose_greedy_tokens(const LogitsProcessors& processors) const {
    for (int64_t i = 0; i < count(); ++i) {
      const int64_t at = pass_.begin + i;
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

  const SearchStepParams& p_;
  const BeamSearchState& state_;
  const Workspace& w_;
  const int64_t max_edits_;
  SearchPass pass_;
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
