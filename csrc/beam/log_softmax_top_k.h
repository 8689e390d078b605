// log_softmax_top_k: the best continuations of each request's beams. docs/reference/beam.md is the
// user's page.
//
// score(beam, token) = log_softmax(logits[row of beam])[token] + beam_score[row]. The candidates of
// a request are sorted by score descending, then beam, then token; the first num_candidates are the
// result. Each row is processed alone and writes its best candidates to `scratch`. Requests are
// merged from there. No tensor of the size of the logits is written.
#pragma once

#include <cstdint>

#include "common/half.h"
#include "simd/kernel_levels.h"

namespace lmdecode::beam {

// Bits of the status of a request. A request with any of them has no candidates. The values are
// top_k_top_p_sample's.
constexpr uint8_t kBeamStatusNan = 1;    // a logit was NaN, or became NaN by processors
constexpr uint8_t kBeamStatusEmpty = 2;  // a row without a logit above -inf, or no candidate
constexpr uint8_t kBeamStatusScore = 4;  // a beam score was NaN or +inf

// Only in the status of a row: a trie constrains it, so its request may have no candidate.
constexpr uint32_t kRowHasTrie = 0x100;
// Beams of this score or less are placeholders (beam_rules.h): copies of the first beam at the
// beginning of a search, and beams that continue in place of missing ones. A trie ignores them.
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
  const int64_t* logits_rows = nullptr;  // [rows]: of the logits; null: in order

  const float* beam_scores = nullptr;  // [rows]; -inf: the row is not read
  int64_t beam_scores_stride = 0;

  // Request r has the rows [row_offsets[r], row_offsets[r + 1]), or num_beams rows if this is
  // null. CUDA cannot check the values before the launch, so kernels clamp them to [0, rows].
  const int64_t* row_offsets = nullptr;  // [requests + 1], contiguous
  int64_t num_beams = 1;

  int32_t* scratch = nullptr;  // [scratch_size()]; results of the rows, see below

  float* scores = nullptr;    // [requests, num_candidates] contiguous; -inf for a missing one,
  int64_t* tokens = nullptr;  // likewise; then 0
  int64_t* beams = nullptr;   // likewise, counted within the request; then 0
  uint8_t* status = nullptr;  // [requests]
  // [requests, num_candidates] contiguous: the scores less the beam scores
  float* log_probs = nullptr;

  // Offset of a row's logits, in elements.
  LMD_HOST_DEVICE int64_t logits_of(int64_t row) const {
    if (logits_rows != nullptr) row = logits_rows[row];
    return row * logits_row_stride;
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

  // The row's request, if it has one; below `requests` in any case.
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
// processors: null if there are none.
void log_softmax_top_k_cpu(const LogSoftmaxTopKParams& params, const LogitsProcessors* processors);

// stream is a cudaStream_t; launches only. values: [rows, vocab] scratch if there are processors.
// All requests share one trie.
void log_softmax_top_k_cuda(const LogSoftmaxTopKParams& params, const LogitsProcessors* processors,
                            float* values, void* stream);

// Its launches: rows without tries, rows of requests with tries (other rows stay unchanged), then
// requests.
void log_softmax_top_k_rows_cuda(const LogSoftmaxTopKParams& params,
                                 const LogitsProcessors* processors, float* values, void* stream);
void log_softmax_top_k_trie_rows_cuda(const LogSoftmaxTopKParams& params,
                                      const LogitsProcessors& processors, float* values,
                                      void* stream);
void log_softmax_top_k_requests_cuda(const LogSoftmaxTopKParams& params, void* stream);

// For requests of one row: as their one candidate the largest logit after the processors, which act
// on logits here. There is a row at least.
void greedy_rows_cuda(const LogSoftmaxTopKParams& params, const LogitsProcessors& processors,
                      float* values, void* stream);

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
