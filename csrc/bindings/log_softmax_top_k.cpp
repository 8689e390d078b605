// log_softmax_top_k on either device.
#include "beam/log_softmax_top_k.h"

#include "bindings/device.h"
#include "bindings/logits_processor_checks.h"
#include "bindings/trie_checks.h"

namespace lmdecode::beam {
namespace {

constexpr const char* kOp = "log_softmax_top_k";

// Offsets that the CPU can read: ascending, from 0 to the number of rows, no request without one.
void check_row_offsets(const int64_t* offsets, int64_t requests, int64_t rows) {
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t beams = offsets[r + 1] - offsets[r];
    if (offsets[r] < 0 || offsets[r + 1] > rows || beams < 1) {
      fail(kOp, "num_beams (row_offsets) gives request ", r, " the rows ", offsets[r], " to ",
           offsets[r + 1], " of ", rows, "; expected at least one beam a request");
    }
  }
  if (offsets[0] != 0 || offsets[requests] != rows) {
    fail(kOp, "num_beams (row_offsets) takes the rows ", offsets[0], " to ", offsets[requests],
         "; expected 0 to ", rows, ", the rows of logits");
  }
}

LogSoftmaxTopKParams log_softmax_top_k_params(const Tensor& logits, const Tensor& beam_scores,
                                              int64_t num_candidates, int64_t num_beams,
                                              const std::optional<Tensor>& row_offsets) {
  LogSoftmaxTopKParams p;
  check_rank(kOp, "logits", logits, 2, "[rows, vocab]");
  p.dtype = float_dtype(kOp, "logits", logits);
  p.rows = logits.size(0);
  p.vocab = logits.size(1);
  if (p.vocab < 1 || p.vocab >= (int64_t{1} << 31)) {
    fail(kOp, "logits has shape ", shape_text(logits),
         "; expected a vocabulary of 1 to 2^31 - 1 tokens");
  }
  p.logits = logits.const_data_ptr();
  p.logits_row_stride = logits.stride(0);
  p.logits_vocab_stride = logits.stride(1);
  const Arguments arguments(kOp, "logits", logits);
  p.beam_scores = arguments.strided<const float>("beam_scores", beam_scores, {p.rows});
  p.beam_scores_stride = beam_scores.stride(0);
  if (num_candidates < 1) fail(kOp, "num_candidates is ", num_candidates, "; expected at least 1");
  p.num_candidates = num_candidates;
  p.row_candidates = num_candidates < p.vocab ? num_candidates : p.vocab;
  if (p.rows * p.row_candidates >= (int64_t{1} << 31)) {
    fail(kOp, "num_candidates is ", num_candidates, " for ", p.rows,
         " rows; expected fewer than 2^31 candidates of all rows together");
  }
  if (row_offsets) {
    p.row_offsets =
        arguments.contiguous<const int64_t>("row_offsets", *row_offsets, {-1}, "[requests + 1]");
    p.requests = row_offsets->size(0) - 1;
    if (p.requests < 0) fail(kOp, "row_offsets has shape [0]; expected [requests + 1]");
    if constexpr (!kIsCuda) check_row_offsets(p.row_offsets, p.requests, p.rows);
  } else {
    if (num_beams < 1) fail(kOp, "num_beams is ", num_beams, "; expected at least 1");
    if (p.rows % num_beams != 0) {
      fail(kOp, "num_beams is ", num_beams, "; expected a divisor of ", p.rows,
           ", the rows of logits");
    }
    p.num_beams = num_beams;
    p.requests = p.rows / num_beams;
  }
  // Far beyond memory, but below what 64 bits can count.
  if (p.requests > 0 && num_candidates >= (int64_t{1} << 40) / p.requests) {
    fail(kOp, "num_candidates is ", num_candidates, " for ", p.requests,
         " requests; expected fewer than 2^40 candidates in all");
  }
  return p;
}

using Result = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// processors: null where there are none.
Result launch(LogSoftmaxTopKParams p, const LogitsProcessors* processors, const Tensor& logits) {
  const OnDevice device(logits);
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
  if constexpr (kIsCuda) {
    Tensor values;
    if (processors != nullptr) values = new_tensor(logits, {p.rows, p.vocab}, ScalarType::Float);
    log_softmax_top_k_cuda(p, processors,
                           processors == nullptr ? nullptr : values.mutable_data_ptr<float>(),
                           device.stream());
  } else {
    log_softmax_top_k_cpu(p, processors);
  }
  return {scores, tokens, beams, status, log_probs};
}

Result plain(const Tensor& logits, const Tensor& beam_scores, int64_t num_candidates,
             int64_t num_beams, const OptionalTensor& row_offsets) {
  return launch(
      log_softmax_top_k_params(logits, beam_scores, num_candidates, num_beams, row_offsets),
      nullptr, logits);
}

// The tensors of a trie, of which each row has a node; null where rows are held to none.
struct TrieTensors {
  const Tensor& tokens;
  const Tensor& child_begin;
  const Tensor& nodes;
};

Result processed(const Tensor& logits, const Tensor& beam_scores, int64_t num_candidates,
                 int64_t num_beams, const OptionalTensor& row_offsets,
                 const ProcessorArguments& processor_arguments, const TrieTensors* trie) {
  const LogSoftmaxTopKParams p =
      log_softmax_top_k_params(logits, beam_scores, num_candidates, num_beams, row_offsets);
  LogitsProcessors processors = ProcessorChecks(kOp, logits, p).check(processor_arguments);
  if (trie != nullptr) {
    const Arguments arguments(kOp, "logits", logits);
    processors.tries.value = token_trie(arguments, trie->tokens, trie->child_begin);
    processors.nodes = arguments.contiguous<const int32_t>("nodes", trie->nodes, {p.rows});
  }
  return launch(p, &processors, logits);
}

Result with_processors(const Tensor& logits, const Tensor& beam_scores, int64_t num_candidates,
                       int64_t num_beams, const OptionalTensor& row_offsets,
                       const OptionalTensor& sequences, const OptionalTensor& lengths,
                       double repetition_penalty, const OptionalTensor& repetition_penalties,
                       int64_t no_repeat_ngram_size, const OptionalTensor& no_repeat_ngram_sizes,
                       const OptionalTensor& end_tokens, int64_t min_length,
                       const OptionalTensor& min_lengths, const OptionalTensor& suppressed_tokens,
                       const OptionalTensor& forced_tokens, const OptionalTensor& diversity_tokens,
                       double diversity_penalty, const OptionalTensor& diversity_penalties,
                       const OptionalTensor& bias, const OptionalTensor& token_bitmask) {
  return processed(
      logits, beam_scores, num_candidates, num_beams, row_offsets,
      {sequences, lengths, repetition_penalty, repetition_penalties, no_repeat_ngram_size,
       no_repeat_ngram_sizes, end_tokens, min_length, min_lengths, suppressed_tokens, forced_tokens,
       diversity_tokens, diversity_penalty, diversity_penalties, bias, token_bitmask},
      nullptr);
}

Result held_to_trie(const Tensor& logits, const Tensor& beam_scores, int64_t num_candidates,
                    int64_t num_beams, const OptionalTensor& row_offsets,
                    const OptionalTensor& sequences, const OptionalTensor& lengths,
                    double repetition_penalty, const OptionalTensor& repetition_penalties,
                    int64_t no_repeat_ngram_size, const OptionalTensor& no_repeat_ngram_sizes,
                    const OptionalTensor& end_tokens, int64_t min_length,
                    const OptionalTensor& min_lengths, const OptionalTensor& suppressed_tokens,
                    const OptionalTensor& forced_tokens, const OptionalTensor& diversity_tokens,
                    double diversity_penalty, const OptionalTensor& diversity_penalties,
                    const OptionalTensor& bias, const OptionalTensor& token_bitmask,
                    const Tensor& trie_tokens, const Tensor& child_begin, const Tensor& nodes) {
  const TrieTensors trie{trie_tokens, child_begin, nodes};
  return processed(
      logits, beam_scores, num_candidates, num_beams, row_offsets,
      {sequences, lengths, repetition_penalty, repetition_penalties, no_repeat_ngram_size,
       no_repeat_ngram_sizes, end_tokens, min_length, min_lengths, suppressed_tokens, forced_tokens,
       diversity_tokens, diversity_penalty, diversity_penalties, bias, token_bitmask},
      &trie);
}

}  // namespace
}  // namespace lmdecode::beam

LMD_OPS(m) {
  m.impl("log_softmax_top_k", TORCH_BOX(&lmdecode::beam::plain));
  m.impl("log_softmax_top_k.processed", TORCH_BOX(&lmdecode::beam::with_processors));
  m.impl("log_softmax_top_k.trie", TORCH_BOX(&lmdecode::beam::held_to_trie));
}
