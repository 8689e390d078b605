// Random calls of log_softmax_top_k in heap buffers of exactly the size that strides span.
#pragma once

#include "beam/log_softmax_top_k.h"
#include "sampling/sample_case.h"

namespace lmdecode::beam::test {

using sampling::test::Buffer;
using sampling::test::Random;

// What a call writes. Scratch is not compared: rows leave their candidates in any order on a GPU.
struct BeamResult {
  BeamResult(const LogSoftmaxTopKParams& p)
      : scores(p.requests * p.num_candidates),
        tokens(p.requests * p.num_candidates),
        beams(p.requests * p.num_candidates),
        status(p.requests),
        log_probs(p.requests * p.num_candidates),
        scratch(LogSoftmaxTopKParams::scratch_size(p.rows, p.row_candidates)) {}

  Buffer<float> scores;
  Buffer<int64_t> tokens, beams;
  Buffer<uint8_t> status;
  Buffer<float> log_probs;
  Buffer<int32_t> scratch;

  bool operator==(const BeamResult& other) const {
    return scores == other.scores && tokens == other.tokens && beams == other.beams &&
           status == other.status && log_probs == other.log_probs;
  }
};

struct BeamCase {
  LogSoftmaxTopKParams params;  // without outputs
  std::string logits_kind, scores_kind;
  Buffer<unsigned char> logits;
  Buffer<float> beam_scores;
  Buffer<int64_t> row_offsets;

  LogSoftmaxTopKParams params_into(const BeamResult& result) const {
    LogSoftmaxTopKParams p = params;
    p.scores = result.scores.data();
    p.tokens = result.tokens.data();
    p.beams = result.beams.data();
    p.status = result.status.data();
    p.log_probs = result.log_probs.data();
    p.scratch = result.scratch.data();
    return p;
  }

  int64_t most_beams() const {
    int64_t most = 0;
    for (int64_t r = 0; r < params.requests; ++r) {
      const auto rows = params.rows_of(r);
      most = std::max(most, rows.end - rows.begin);
    }
    return most;
  }

  std::string describe() const {
    std::ostringstream text;
    text << "rows " << params.rows << " vocab " << params.vocab << " requests " << params.requests
         << " ragged " << (params.row_offsets != nullptr) << " candidates " << params.num_candidates
         << " dtype " << static_cast<int>(params.dtype) << " strides " << params.logits_row_stride
         << "," << params.logits_vocab_stride << " logits " << logits_kind << " beam scores "
         << scores_kind;
    return text.str();
  }
};

inline BeamCase random_case(uint64_t seed, int64_t requests, int64_t vocab) {
  Random random(seed);
  BeamCase c;
  LogSoftmaxTopKParams& p = c.params;
  p.requests = requests;
  p.vocab = vocab;
  p.dtype = random.any_of({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  if (random.chance(0.5)) {
    c.row_offsets = Buffer<int64_t>(requests + 1);
    for (int64_t r = 0; r < requests; ++r)
      c.row_offsets[r + 1] = c.row_offsets[r] + 1 + random.below(4);
    p.row_offsets = c.row_offsets.data();
    p.rows = c.row_offsets[requests];
  } else {
    p.num_beams = 1 + random.below(4);
    p.rows = requests * p.num_beams;
  }
  p.num_candidates =
      random.chance(0.5)
          ? 1 + random.below(12)
          : random.any_of<int64_t>({1, 2 * p.num_beams, vocab, 1 + vocab / 2, 4 * vocab + 3});
  p.num_candidates = std::min<int64_t>(p.num_candidates, 500);
  p.row_candidates = std::min(p.num_candidates, vocab);

  c.logits_kind =
      random.any_of({"normal", "normal", "flat", "peaked", "ties", "ties", "equal", "zeros",
                     "ascending", "masked", "infinite", "huge", "tiny", "neighbours"});
  if (random.chance(0.15)) c.logits_kind = random.any_of({"nan", "none"});
  p.logits_vocab_stride = random.chance(0.75) ? 1 : random.below(4);
  const int64_t span = (vocab - 1) * p.logits_vocab_stride + 1;
  p.logits_row_stride = random.chance(0.1) ? 0 : span + (random.chance(0.5) ? 0 : random.below(9));
  const int64_t offset = random.chance(0.4) ? 0 : random.below(9);  // alignment
  const int64_t elements = offset + (p.rows - 1) * p.logits_row_stride + span;
  const int64_t element_bytes = p.dtype == DType::kFloat32 ? 4 : 2;
  c.logits = Buffer<unsigned char>(elements * element_bytes);
  const bool clean_rows = random.chance(0.5);  // NaN in some rows alone
  for (int64_t i = 0; i < elements; ++i) {
    const bool clean = clean_rows && i / span % 3 != 1;
    const float value =
        sampling::test::random_logit(random, clean ? "normal" : c.logits_kind, i % vocab, vocab);
    unsigned char* to = c.logits.data() + i * element_bytes;
    if (p.dtype == DType::kFloat32) {
      std::memcpy(to, &value, 4);
    } else {
      uint16_t bits;
      sampling::test::round_to(p.dtype, value, &bits);
      std::memcpy(to, &bits, 2);
    }
  }
  p.logits = c.logits.data() + offset * element_bytes;

  const float infinity = std::numeric_limits<float>::infinity();
  c.scores_kind = random.any_of({"normal", "normal", "first", "equal", "far", "dead", "wrong"});
  p.beam_scores_stride = 1 + random.below(2);
  c.beam_scores = Buffer<float>((p.rows - 1) * p.beam_scores_stride + 1);
  for (int64_t row = 0; row < p.rows; ++row) {
    float& score = c.beam_scores[row * p.beam_scores_stride];
    score = -5.0f * static_cast<float>(random.uniform());
    if (c.scores_kind == "first") score = random.chance(0.4) ? 0.0f : -1e9f;
    if (c.scores_kind == "equal") score = -1.5f;
    if (c.scores_kind == "far") score = random.any_of({-1e5f, -1e7f, -3.4e38f, 1e6f, -0.0f});
    if (c.scores_kind == "dead" && random.chance(0.6)) score = -infinity;
    if (c.scores_kind == "wrong" && random.chance(0.2))
      score = random.any_of({infinity, std::numeric_limits<float>::quiet_NaN()});
  }
  p.beam_scores = c.beam_scores.data();
  return c;
}

// Where two results differ, for a message.
inline std::string difference(const BeamCase& c, const BeamResult& a, const BeamResult& b) {
  std::ostringstream text;
  for (int64_t r = 0; r < c.params.requests; ++r) {
    if (a.status[r] != b.status[r])
      text << "\n  request " << r << ": status " << int(a.status[r]) << " and " << int(b.status[r]);
    for (int64_t i = 0; i < c.params.num_candidates; ++i) {
      const int64_t at = r * c.params.num_candidates + i;
      if (bits_of(a.scores[at]) == bits_of(b.scores[at]) && a.tokens[at] == b.tokens[at] &&
          a.beams[at] == b.beams[at] && bits_of(a.log_probs[at]) == bits_of(b.log_probs[at])) {
        continue;
      }
      text << "\n  request " << r << " candidate " << i << ": score " << a.scores[at] << " and "
           << b.scores[at] << ", token " << a.tokens[at] << " and " << b.tokens[at] << ", beam "
           << a.beams[at] << " and " << b.beams[at] << ", log_prob " << a.log_probs[at] << " and "
           << b.log_probs[at];
      break;
    }
  }
  return text.str();
}

}  // namespace lmdecode::beam::test
