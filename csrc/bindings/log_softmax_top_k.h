// Arguments of log_softmax_top_k to kernel parameters: shared by the CPU and the CUDA library.
#pragma once

#include "bindings/logits_processor_checks.h"
#include "bindings/trie_checks.h"

namespace lmdecode::beam {

constexpr const char* kLogSoftmaxTopKOp = "log_softmax_top_k";

// Offsets that the CPU can read: ascending, from 0 to the number of rows, no request without one.
inline void check_row_offsets(const Tensor& row_offsets, int64_t rows) {
  const int64_t* offsets = row_offsets.const_data_ptr<int64_t>();
  const int64_t requests = row_offsets.size(0) - 1;
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t beams = offsets[r + 1] - offsets[r];
    if (offsets[r] < 0 || offsets[r + 1] > rows || beams < 1) {
      fail(kLogSoftmaxTopKOp, "num_beams (row_offsets) gives request ", r, " the rows ", offsets[r],
           " to ", offsets[r + 1], " of ", rows, "; expected at least one beam a request");
    }
  }
  if (offsets[0] != 0 || offsets[requests] != rows) {
    fail(kLogSoftmaxTopKOp, "num_beams (row_offsets) takes the rows ", offsets[0], " to ",
         offsets[requests], "; expected 0 to ", rows, ", the rows of logits");
  }
}

inline LogSoftmaxTopKParams log_softmax_top_k_params(const Tensor& logits,
                                                     const Tensor& beam_scores,
                                                     int64_t num_candidates, int64_t num_beams,
                                                     const std::optional<Tensor>& row_offsets) {
  const char* op = kLogSoftmaxTopKOp;
  LogSoftmaxTopKParams p;
  check_rank(op, "logits", logits, 2, "[rows, vocab]");
  p.dtype = float_dtype(op, "logits", logits);
  p.rows = logits.size(0);
  p.vocab = logits.size(1);
  if (p.vocab < 1 || p.vocab >= (int64_t{1} << 31)) {
    fail(op, "logits has shape ", shape_text(logits),
         "; expected a vocabulary of 1 to 2^31 - 1 tokens");
  }
  p.logits = logits.const_data_ptr();
  p.logits_row_stride = logits.stride(0);
  p.logits_vocab_stride = logits.stride(1);
  check_same_device(op, "beam_scores", beam_scores, "logits", logits);
  check_shape(op, "beam_scores", beam_scores, p.rows);
  check_dtype(op, "beam_scores", beam_scores, ScalarType::Float);
  p.beam_scores = beam_scores.const_data_ptr<float>();
  p.beam_scores_stride = beam_scores.stride(0);
  if (num_candidates < 1) fail(op, "num_candidates is ", num_candidates, "; expected at least 1");
  p.num_candidates = num_candidates;
  p.row_candidates = num_candidates < p.vocab ? num_candidates : p.vocab;
  if (p.rows * p.row_candidates >= (int64_t{1} << 31)) {
    fail(op, "num_candidates is ", num_candidates, " for ", p.rows,
         " rows; expected fewer than 2^31 candidates of all rows together");
  }
  if (row_offsets) {
    check_same_device(op, "row_offsets", *row_offsets, "logits", logits);
    check_rank(op, "row_offsets", *row_offsets, 1, "[requests + 1]");
    check_dtype(op, "row_offsets", *row_offsets, ScalarType::Long);
    if (row_offsets->size(0) < 1 || !row_offsets->is_contiguous()) {
      fail(op, "row_offsets has shape ", shape_text(*row_offsets),
           "; expected [requests + 1], contiguous");
    }
    if (logits.is_cpu()) check_row_offsets(*row_offsets, p.rows);
    p.requests = row_offsets->size(0) - 1;
    p.row_offsets = row_offsets->const_data_ptr<int64_t>();
  } else {
    if (num_beams < 1) fail(op, "num_beams is ", num_beams, "; expected at least 1");
    if (p.rows % num_beams != 0) {
      fail(op, "num_beams is ", num_beams, "; expected a divisor of ", p.rows,
           ", the rows of logits");
    }
    p.num_beams = num_beams;
    p.requests = p.rows / num_beams;
  }
  // Far beyond memory, but below what 64 bits can count.
  if (p.requests > 0 && num_candidates >= (int64_t{1} << 40) / p.requests) {
    fail(op, "num_candidates is ", num_candidates, " for ", p.requests,
         " requests; expected fewer than 2^40 candidates in all");
  }
  return p;
}

// The op on one device, which `run(params, processors, logits)` launches, with the device of the
// logits selected by Guard; processors is null where there are none.
template <auto run, class Guard>
struct LogSoftmaxTopKOp {
  using Result = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

  static Result call(const Tensor& logits, const Tensor& beam_scores, int64_t num_candidates,
                     int64_t num_beams, const OptionalTensor& row_offsets) {
    return launch(
        log_softmax_top_k_params(logits, beam_scores, num_candidates, num_beams, row_offsets),
        nullptr, logits);
  }

  static Result processed(const Tensor& logits, const Tensor& beam_scores, int64_t num_candidates,
                          int64_t num_beams, const OptionalTensor& row_offsets,
                          const OptionalTensor& sequences, const OptionalTensor& lengths,
                          double repetition_penalty, const OptionalTensor& repetition_penalties,
                          int64_t no_repeat_ngram_size, const OptionalTensor& no_repeat_ngram_sizes,
                          const OptionalTensor& end_tokens, int64_t min_length,
                          const OptionalTensor& min_lengths,
                          const OptionalTensor& suppressed_tokens,
                          const OptionalTensor& forced_tokens,
                          const OptionalTensor& diversity_tokens, double diversity_penalty,
                          const OptionalTensor& diversity_penalties, const OptionalTensor& bias,
                          const OptionalTensor& token_bitmask) {
    const LogSoftmaxTopKParams p =
        log_softmax_top_k_params(logits, beam_scores, num_candidates, num_beams, row_offsets);
    const LogitsProcessors processors =
        ProcessorChecks(kLogSoftmaxTopKOp, logits, p)
            .check({sequences, lengths, repetition_penalty, repetition_penalties,
                    no_repeat_ngram_size, no_repeat_ngram_sizes, end_tokens, min_length,
                    min_lengths, suppressed_tokens, forced_tokens, diversity_tokens,
                    diversity_penalty, diversity_penalties, bias, token_bitmask});
    return launch(p, &processors, logits);
  }

  static Result held_to_trie(
      const Tensor& logits, const Tensor& beam_scores, int64_t num_candidates, int64_t num_beams,
      const OptionalTensor& row_offsets, const OptionalTensor& sequences,
      const OptionalTensor& lengths, double repetition_penalty,
      const OptionalTensor& repetition_penalties, int64_t no_repeat_ngram_size,
      const OptionalTensor& no_repeat_ngram_sizes, const OptionalTensor& end_tokens,
      int64_t min_length, const OptionalTensor& min_lengths,
      const OptionalTensor& suppressed_tokens, const OptionalTensor& forced_tokens,
      const OptionalTensor& diversity_tokens, double diversity_penalty,
      const OptionalTensor& diversity_penalties, const OptionalTensor& bias,
      const OptionalTensor& token_bitmask, const Tensor& trie_tokens, const Tensor& child_begin,
      const Tensor& nodes) {
    const LogSoftmaxTopKParams p =
        log_softmax_top_k_params(logits, beam_scores, num_candidates, num_beams, row_offsets);
    LogitsProcessors processors =
        ProcessorChecks(kLogSoftmaxTopKOp, logits, p)
            .check({sequences, lengths, repetition_penalty, repetition_penalties,
                    no_repeat_ngram_size, no_repeat_ngram_sizes, end_tokens, min_length,
                    min_lengths, suppressed_tokens, forced_tokens, diversity_tokens,
                    diversity_penalty, diversity_penalties, bias, token_bitmask});
    processors.tries.value =
        token_trie(kLogSoftmaxTopKOp, trie_tokens, child_begin, "logits", logits);
    check_trie_tensor(kLogSoftmaxTopKOp, "nodes", nodes, p.rows, "logits", logits);
    processors.nodes = nodes.const_data_ptr<int32_t>();
    return launch(p, &processors, logits);
  }

  static Result launch(LogSoftmaxTopKParams p, const LogitsProcessors* processors,
                       const Tensor& logits) {
    const Guard guard(logits);
    const int64_t k = p.num_candidates;
    Tensor scores = new_tensor(logits, {p.requests, k}, ScalarType::Float);
    Tensor tokens = new_tensor(logits, {p.requests, k}, ScalarType::Long);
    Tensor beams = new_tensor(logits, {p.requests, k}, ScalarType::Long);
    Tensor status = new_tensor(logits, {p.requests}, ScalarType::Byte);
    Tensor log_probs = new_tensor(logits, {p.requests, k}, ScalarType::Float);
    Tensor scratch = new_tensor(
        logits, {LogSoftmaxTopKParams::scratch_size(p.rows, p.row_candidates)}, ScalarType::Int);
    p.scores = scores.mutable_data_ptr<float>();
    p.tokens = tokens.mutable_data_ptr<int64_t>();
    p.beams = beams.mutable_data_ptr<int64_t>();
    p.status = status.mutable_data_ptr<uint8_t>();
    p.log_probs = log_probs.mutable_data_ptr<float>();
    p.scratch = scratch.mutable_data_ptr<int32_t>();
    run(p, processors, logits);
    return {scores, tokens, beams, status, log_probs};
  }
};

}  // namespace lmdecode::beam
