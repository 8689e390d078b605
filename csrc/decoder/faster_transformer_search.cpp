#include "decoder/faster_transformer_search.h"

#include <algorithm>

#include "beam/log_softmax_top_k.h"
#include "common/float_mode.h"
#include "common/split_memory.h"
#include "decoder/beam_parents.h"

namespace lmdecode::decoder {
namespace {

constexpr float kNoScore = -1.0e20f;  // of all beams but the first, at the beginning

struct Candidate {
  float score;
  int64_t token;
  int64_t beam;

  // In the order of the flat scores: highest first, ties to the lowest index.
  bool operator<(const Candidate& other) const {
    if (score != other.score) return score > other.score;
    return beam != other.beam ? beam < other.beam : token < other.token;
  }
};

struct SearchMemory {
  unsigned char* forward;
  float* scores;          // [rows]
  int64_t* tokens;        // [rows]: the last ones
  uint8_t* finished;      // [rows]
  int32_t* lengths;       // [rows]
  int64_t* row_beams;     // [rows]: the beam of each row of the step
  int64_t* requests;      // [batch]: those that have rows in the step
  int64_t* row_offsets;   // [batch + 1]
  float* beam_scores;     // [rows]
  float* top_scores;      // [batch, beams]
  float* top_log_probs;   // likewise
  int64_t* top_tokens;    // likewise
  int64_t* top_beams;     // likewise
  uint8_t* status;        // [batch]
  int32_t* scratch;       // see LogSoftmaxTopKParams
  Candidate* candidates;  // [2 * beams]
  uint8_t* old_finished;  // [beams]
  int32_t* old_lengths;   // [beams]
  BeamParents parents;

  size_t split(const FasterTransformerParams& p, void* memory) {
    const int64_t rows = p.batch * p.beams;
    SplitMemory block(memory);
    block.take(&forward, static_cast<int64_t>(DecoderForward::bytes(p.config, rows, rows)));
    block.take(&scores, rows);
    block.take(&tokens, rows);
    block.take(&finished, rows);
    block.take(&lengths, rows);
    block.take(&row_beams, rows);
    block.take(&requests, p.batch);
    block.take(&row_offsets, p.batch + 1);
    block.take(&beam_scores, rows);
    block.take(&top_scores, rows);
    block.take(&top_log_probs, rows);
    block.take(&top_tokens, rows);
    block.take(&top_beams, rows);
    block.take(&status, p.batch);
    const int64_t row_candidates = std::min(p.beams, p.config.vocab);
    block.take(&scratch, beam::LogSoftmaxTopKParams::scratch_size(rows, row_candidates));
    block.take(&candidates, 2 * p.beams);
    block.take(&old_finished, p.beams);
    block.take(&old_lengths, p.beams);
    parents.take(&block, p.beams, p.caches.capacity);
    return block.used();
  }
};

class Search {
 public:
  Search(const FasterTransformerParams& p, const SearchMemory& memory)
      : p_(p),
        m_(memory),
        forward_(p.config, p.weights, p.caches, p.batch * p.beams, p.batch * p.beams,
                 memory.forward) {}

  uint8_t run() {
    const int64_t rows = p_.batch * p_.beams;
    for (int64_t row = 0; row < rows; ++row) {
      m_.scores[row] = row % p_.beams == 0 ? 0.0f : kNoScore;
      m_.tokens[row] = p_.start_token;
      m_.finished[row] = 0;
      m_.lengths[row] = 0;
    }
    for (int64_t i = 0; i < p_.max_steps * rows; ++i) {
      p_.output_ids[i] = static_cast<int32_t>(p_.end_token);
      p_.parent_ids[i] = static_cast<int32_t>(i % rows);
    }
    uint8_t failed = 0;
    for (int64_t step = 0; step < p_.max_steps && failed == 0; ++step) {
      const int64_t requests = collect_rows(step);
      if (requests == 0) break;
      forward_.run(/*to_logits=*/true);
      choose(requests);
      for (int64_t i = 0; i < requests && failed == 0; ++i) {
        failed = m_.status[i];
        if (failed == 0) advance(i, step);
      }
    }
    std::copy_n(m_.lengths, rows, p_.sequence_lengths);
    return failed;
  }

 private:
  int64_t collect_rows(int64_t step) {
    forward_.clear();
    int64_t requests = 0;
    for (int64_t request = 0; request < p_.batch; ++request) {
      const int64_t first = forward_.count();
      for (int64_t beam = 0; beam < p_.beams; ++beam) {
        const int64_t row = request * p_.beams + beam;
        if (m_.finished[row] != 0) continue;
        m_.row_beams[forward_.count()] = beam;
        m_.beam_scores[forward_.count()] = m_.scores[row];
        forward_.add(row, step, row / p_.memory_rows, m_.tokens[row]);
      }
      if (forward_.count() == first) continue;
      m_.requests[requests] = request;
      m_.row_offsets[requests++] = first;
    }
    m_.row_offsets[requests] = forward_.count();
    return requests;
  }

  void choose(int64_t requests) {
    beam::LogSoftmaxTopKParams top;
    top.rows = forward_.count();
    top.vocab = p_.config.vocab;
    top.requests = requests;
    top.num_candidates = p_.beams;
    top.row_candidates = std::min(p_.beams, top.vocab);
    top.logits = forward_.logits();
    top.logits_row_stride = top.vocab;
    top.beam_scores = m_.beam_scores;
    top.beam_scores_stride = 1;
    top.row_offsets = m_.row_offsets;
    top.scratch = m_.scratch;
    top.scores = m_.top_scores;
    top.tokens = m_.top_tokens;
    top.beams = m_.top_beams;
    top.status = m_.status;
    top.log_probs = m_.top_log_probs;
    log_softmax_top_k_cpu(top, nullptr);
  }

  // The candidates of the i-th request of the step, and the beams that have finished.
  void collect_candidates(int64_t i) const {
    const int64_t first = m_.requests[i] * p_.beams;
    int64_t count = 0;
    for (int64_t j = i * p_.beams; j < (i + 1) * p_.beams; ++j) {
      if (!(m_.top_scores[j] > minus_infinity())) break;
      m_.candidates[count++] = {m_.top_scores[j], m_.top_tokens[j],
                                m_.row_beams[m_.row_offsets[i] + m_.top_beams[j]]};
    }
    for (int64_t beam = 0; beam < p_.beams; ++beam) {
      if (m_.finished[first + beam] == 0) continue;
      m_.candidates[count++] = {m_.scores[first + beam], p_.end_token, beam};
    }
    std::sort(m_.candidates, m_.candidates + count);
    while (count < p_.beams) m_.candidates[count++] = {minus_infinity(), p_.end_token, 0};
  }

  void advance(int64_t i, int64_t step) {
    const int64_t first = m_.requests[i] * p_.beams;
    collect_candidates(i);
    std::copy_n(m_.finished + first, p_.beams, m_.old_finished);
    std::copy_n(m_.lengths + first, p_.beams, m_.old_lengths);
    int32_t* const ids = p_.output_ids + step * p_.batch * p_.beams;
    int32_t* const parents = p_.parent_ids + step * p_.batch * p_.beams;
    for (int64_t beam = 0; beam < p_.beams; ++beam) {
      const Candidate& candidate = m_.candidates[beam];
      const int64_t row = first + beam;
      m_.scores[row] = candidate.score;
      m_.tokens[row] = candidate.token;
      m_.finished[row] = candidate.token == p_.end_token;
      m_.lengths[row] =
          m_.old_lengths[candidate.beam] + (m_.old_finished[candidate.beam] == 0 ? 1 : 0);
      m_.parents.parents[beam] = static_cast<int32_t>(candidate.beam);
      ids[row] = static_cast<int32_t>(candidate.token);
      parents[row] = static_cast<int32_t>(first + candidate.beam);
    }
    m_.parents.follow(p_.caches, first, p_.beams, step + 1);
  }

  const FasterTransformerParams& p_;
  const SearchMemory m_;
  DecoderForward forward_;
};

}  // namespace

size_t faster_transformer_workspace_bytes(const FasterTransformerParams& params) {
  return SearchMemory{}.split(params, nullptr);
}

uint8_t faster_transformer_search_cpu(const FasterTransformerParams& params) {
  SearchMemory memory{};
  memory.split(params, params.workspace);
  const ScopedIeeeMode ieee;
  return Search(params, memory).run();
}

}  // namespace lmdecode::decoder
