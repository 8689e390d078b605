// log_softmax_top_k: the best continuations of each request's beams. docs/reference/beam.md is the
// user's page.
//
// score(beam, token) = log_softmax(logits[row of beam])[token] + beam_score[row]. Over the beams of
// a request the candidates stand in the order "score descending, then beam, then token"; the first
// num_candidates are the result. Rows are worked on alone, each leaves its own best in `scratch`,
// and requests are merged from there: a tensor of the size of the logits is never written.
#pragma once

#include <cstdint>

#include "common/half.h"
#include "simd/kernel_levels.h"

namespace lmdecode::beam {

// Bits of the status of a request; any of them leaves the request without candidates. The numbers
// are those of top_k_top_p_sample.
constexpr uint8_t kBeamStatusNan = 1;    // a logit was NaN, or processors made a NaN of it
constexpr uint8_t kBeamStatusEmpty = 2;  // a row without a logit above -inf, or no candidate
constexpr uint8_t kBeamStatusScore = 4;  // a beam score was NaN or +inf

// In the status of a row alone: it is held to a trie, so that its request may have no candidate.
constexpr uint32_t kRowHasTrie = 0x100;
// Beams of a score from here down exist in name only (beam_rules.h): copies of the first one where
// a search begins, and those that go on for want of others. A trie does without them.
constexpr float kRealBeamScoreBound = -1.0e8f;
constexpr float kUnusedBeamScore = -1.0e9f;  // of such copies where a search begins

struct LogSoftmaxTopKParams {
  int64_t rows = 0;
  int64_t vocab = 0;  // >= 1, < 2^31
  int64_t requests = 0;
  int64_t num_candidates = 0;  // >= 1
  int64_t row_candidates = 0;  // min(num_candidates, vocab); rows * row_candidates < 2^31

  const void* logits = nullptr;  // [rows, vocab] of dtype, strides in elements
  DType dtype = DType::kFloat32;
  int64_t logits_row_stride = 0;
  int64_t logits_vocab_stride = 1;
  const int64_t* logits_rows = nullptr;  // [rows]: which of the logits each is; null: in order

  const float* beam_scores = nullptr;  // [rows]; -inf: the row is not looked at
  int64_t beam_scores_stride = 0;

  // Request r has the rows [row_offsets[r], row_offsets[r + 1]), or num_beams rows where this is
  // null. CUDA cannot look at it before the launch, so kernels hold what it says to [0, rows].
  const int64_t* row_offsets = nullptr;  // [requests + 1], contiguous
  int64_t num_beams = 1;

  int32_t* scratch = nullptr;  // [scratch_size()]; what a row leaves behind, see below

  float* scores = nullptr;    // [requests, num_candidates] contiguous; -inf where there is none,
  int64_t* tokens = nullptr;  // likewise; then 0
  int64_t* beams = nullptr;   // likewise, counted within the request; then 0
  uint8_t* status = nullptr;  // [requests]
  // [requests, num_candidates] contiguous: the scores without those of the beams
  float* log_probs = nullptr;

  // Where the logits of a row begin, in elements.
  LMD_HOST_DEVICE int64_t logits_of(int64_t row) const {
    return (logits_rows == nullptr ? row : logits_rows[row]) * logits_row_stride;
  }

  LMD_HOST_DEVICE static int64_t scratch_size(int64_t rows, int64_t row_candidates) {
    return rows * (3 * row_candidates + 2);
  }
  LMD_HOST_DEVICE float* row_scores(int64_t row) const {  // [row_candidates]
    return reinterpret_cast<float*>(scratch) + row * row_candidates;
  }
  LMD_HOST_DEVICE float* row_log_probs(int64_t row) const {  // [row_candidates]
    return reinterpret_cast<float*>(scratch) + (rows + row) * row_candidates;
  }
  LMD_HOST_DEVICE uint32_t* row_tokens(int64_t row) const {  // [row_candidates]
    return reinterpret_cast<uint32_t*>(scratch) + (2 * rows + row) * row_candidates;
  }
  LMD_HOST_DEVICE uint32_t* row_count(int64_t row) const {  // of the candidates
    return reinterpret_cast<uint32_t*>(scratch) + 3 * rows * row_candidates + row;
  }
  LMD_HOST_DEVICE uint32_t* row_status(int64_t row) const { return row_count(row) + rows; }

  // The request that has the row, where there is one; below `requests` in any case.
  LMD_HOST_DEVICE int64_t request_of(int64_t row) const {
    if (row_offsets == nullptr) return row / num_beams;
    int64_t low = 0, high = requests;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (row_offsets[middle] <= row ? low : high) = middle;
    }
    return low;
  }

  struct RowRange {
    int64_t begin, end;
  };
  LMD_HOST_DEVICE RowRange rows_of(int64_t request) const {
    if (row_offsets == nullptr) return {request * num_beams, (request + 1) * num_beams};
    int64_t begin = row_offsets[request], end = row_offsets[request + 1];
    begin = begin < 0 ? 0 : begin < rows ? begin : rows;
    end = end < begin ? begin : end < rows ? end : rows;
    return {begin, end};
  }
};

struct LogitsProcessors;

// Runs on the calling thread and torch's worker threads; the arguments have been checked.
// processors: null where there are none.
void log_softmax_top_k_cpu(const LogSoftmaxTopKParams& params, const LogitsProcessors* processors);

// stream is a cudaStream_t; launches only. values: [rows, vocab] scratch where there are
// processors. A trie is one for all requests.
void log_softmax_top_k_cuda(const LogSoftmaxTopKParams& params, const LogitsProcessors* processors,
                            float* values, void* stream);

// Its rows, where they are held to a trie: there is a row at least.
void log_softmax_top_k_trie_rows_cuda(const LogSoftmaxTopKParams& params,
                                      const LogitsProcessors& processors, float* values,
                                      void* stream);

}  // namespace lmdecode::beam

LMD_DECLARE_KERNELS(beam, void log_softmax_top_k_rows(const LogSoftmaxTopKParams& params,
                                                      int64_t begin, int64_t end, void* workspace);
                    void log_softmax_top_k_requests(const LogSoftmaxTopKParams& params,
                                                    int64_t begin, int64_t end, int64_t size,
                                                    void* workspace);
                    void log_softmax_top_k_processed_rows(const LogSoftmaxTopKParams& params,
                                                          const LogitsProcessors& processors,
                                                          int64_t max_edits, int64_t begin,
                                                          int64_t end, void* workspace);)
