// log_softmax_top_k on either device.
#include "beam/log_softmax_top_k.h"

#include <cmath>

#include "beam/logits_processors.h"
#include "bindings/device.h"
#include "bindings/tensor_checks.h"
#include "bindings/trie_checks.h"

namespace lmdecode::beam {
namespace {

// As the schema of log_softmax_top_k.processed has them: a number for all requests or, instead of
// it, a tensor of one for each.
struct ProcessorArguments {
  const OptionalTensor& sequences;
  const OptionalTensor& lengths;
  double repetition_penalty;
  const OptionalTensor& repetition_penalties;
  int64_t no_repeat_ngram_size;
  const OptionalTensor& no_repeat_ngram_sizes;
  const OptionalTensor& end_tokens;
  int64_t min_length;
  const OptionalTensor& min_lengths;
  const OptionalTensor& suppressed_tokens;
  const OptionalTensor& forced_tokens;
  const OptionalTensor& diversity_tokens;
  double diversity_penalty;
  const OptionalTensor& diversity_penalties;
  const OptionalTensor& bias;
  const OptionalTensor& token_bitmask;
};

// Checks each against the logits, and converts it to kernel parameters.
class ProcessorChecks {
 public:
  ProcessorChecks(const char* op, const Tensor& logits, const LogSoftmaxTopKParams& params)
      : op_(op), arguments_(op, "logits", logits), params_(params) {}

  LogitsProcessors check(const ProcessorArguments& a) const {
    LogitsProcessors p;
    if (a.sequences) {
      check_tensor("sequences", *a.sequences, ScalarType::Long);
      if (a.sequences->dim() != 2 || a.sequences->size(0) != params_.rows) {
        fail(op_, "sequences has shape ", shape_text(*a.sequences), "; expected [", params_.rows,
             ", capacity], a row for each of the logits");
      }
      if (a.sequences->size(1) >= kMaxTokens) {
        fail(op_, "sequences has shape ", shape_text(*a.sequences),
             "; expected fewer than 2^28 tokens a row");
      }
      using Rows = TensorRows<int64_t>;
      p.sequences = {a.sequences->const_data_ptr<int64_t>(), a.sequences->size(1),
                     a.sequences->stride(0), a.sequences->stride(1), Rows::Per::kBeam};
    }
    p.lengths = per_request<int64_t>("lengths", p.sequences.size, a.lengths);
    if (a.lengths && a.sequences && arguments_.on_cpu()) check_lengths(p);
    p.repetition_penalty =
        per_request<float>("repetition_penalty", number("repetition_penalty", a.repetition_penalty),
                           a.repetition_penalties);
    if (!(p.repetition_penalty.value > 0.0f)) {
      fail(op_, "repetition_penalty is ", a.repetition_penalty,
           "; expected a number above 0 in float32");
    }
    if (a.no_repeat_ngram_size < 0) {
      fail(op_, "no_repeat_ngram_size is ", a.no_repeat_ngram_size, "; expected 0 or more");
    }
    p.no_repeat_ngram_size = per_request<int64_t>("no_repeat_ngram_size", a.no_repeat_ngram_size,
                                                  a.no_repeat_ngram_sizes);
    p.end_tokens = token_lists("end_tokens", a.end_tokens, /*one_for_all=*/true);
    p.min_lengths = per_request<int64_t>("min_lengths", a.min_length, a.min_lengths);
    p.suppressed_tokens = token_lists("suppressed_tokens", a.suppressed_tokens, true);
    p.diversity_tokens = token_lists("diversity_tokens", a.diversity_tokens, false);
    p.diversity_penalty =
        per_request<float>("diversity_penalty", number("diversity_penalty", a.diversity_penalty),
                           a.diversity_penalties);
    if (a.forced_tokens) p.forced_tokens = forced(*a.forced_tokens);
    if (a.bias) {
      p.bias = matrix<float>("bias", *a.bias, params_.vocab, true);
    }
    if (a.token_bitmask) {
      p.token_bitmask =
          matrix<int32_t>("token_bitmask", *a.token_bitmask, (params_.vocab + 31) / 32, false);
    }
    const bool looks_back = a.repetition_penalty != 1.0 || a.repetition_penalties ||
                            a.no_repeat_ngram_size != 0 || a.no_repeat_ngram_sizes;
    if (looks_back && !a.sequences) {
      fail(op_,
           "sequences is None; expected the tokens so far, [rows, capacity], for "
           "repetition_penalty and no_repeat_ngram_size");
    }
    if (a.end_tokens && !a.sequences && !a.lengths) {
      fail(op_, "lengths is None; expected [", params_.requests,
           "], or sequences, to compare with min_lengths");
    }
    return p;
  }

 private:
  static constexpr int64_t kMaxTokens = int64_t{1} << 28;

  void check_tensor(const char* name, const Tensor& tensor, ScalarType type) const {
    check_dtype(op_, name, tensor, type);
    arguments_.check_device(name, tensor);
  }

  float number(const char* name, double value) const {
    if (!std::isfinite(static_cast<float>(value))) {
      fail(op_, name, " is ", value, "; expected a number, finite in float32");
    }
    return static_cast<float>(value);
  }

  template <class T>
  PerRow<T> per_request(const char* name, T value, const OptionalTensor& rows) const {
    if (!rows) return {value, nullptr, 0};
    const T* const data = arguments_.strided<const T>(name, *rows, {params_.requests});
    return {value, data, rows->stride(0)};
  }

  void check_lengths(const LogitsProcessors& p) const {
    for (int64_t request = 0; request < params_.requests; ++request) {
      const int64_t length = p.lengths.at(request);
      if (length < 0 || length > p.sequences.size) {
        fail(op_, "lengths has ", length, " for request ", request, "; expected 0 to ",
             p.sequences.size, ", the columns of sequences");
      }
    }
  }

  // [requests, size] or, for all requests, [size]
  TensorRows<int64_t> token_lists(const char* name, const OptionalTensor& tensor,
                                  bool one_for_all) const {
    using Rows = TensorRows<int64_t>;
    if (!tensor) return {};
    check_tensor(name, *tensor, ScalarType::Long);
    const int64_t rank = tensor->dim();
    const bool ok =
        (rank == 1 && one_for_all) || (rank == 2 && tensor->size(0) == params_.requests);
    if (!ok) {
      fail(op_, name, " has shape ", shape_text(*tensor), "; expected ",
           one_for_all ? "[tokens] or [" : "[", params_.requests, ", tokens]");
    }
    if (tensor->size(rank - 1) >= kMaxTokens) {
      fail(op_, name, " has shape ", shape_text(*tensor),
           "; expected fewer than 2^28 tokens a request");
    }
    return {tensor->const_data_ptr<int64_t>(), tensor->size(rank - 1),
            rank == 2 ? tensor->stride(0) : 0, tensor->stride(rank - 1),
            rank == 2 ? Rows::Per::kRequest : Rows::Per::kCall};
  }

  TensorRows<int64_t> forced(const Tensor& tensor) const {
    using Rows = TensorRows<int64_t>;
    check_tensor("forced_tokens", tensor, ScalarType::Long);
    const bool by_request = tensor.dim() == 1 && tensor.size(0) == params_.requests;
    if (!by_request && (tensor.dim() != 1 || tensor.size(0) != params_.rows)) {
      fail(op_, "forced_tokens has shape ", shape_text(tensor), "; expected [", params_.requests,
           "], one a request, or [", params_.rows, "], one a row");
    }
    return {tensor.const_data_ptr<int64_t>(), 1, tensor.stride(0), 1,
            by_request ? Rows::Per::kRequest : Rows::Per::kBeam};
  }

  // [requests, columns], [rows, columns] or, for all requests, [columns]
  template <class T>
  TensorRows<T> matrix(const char* name, const Tensor& tensor, int64_t columns,
                       bool one_for_all) const {
    using Rows = TensorRows<T>;
    check_tensor(name, tensor, scalar_type_of<T>());
    const int64_t rank = tensor.dim();
    const bool fits = rank >= 1 && tensor.size(rank - 1) == columns;
    const T* data = tensor.const_data_ptr<T>();
    if (fits && rank == 1 && one_for_all) {
      return {data, columns, 0, tensor.stride(0), Rows::Per::kCall};
    }
    const bool by_request = fits && rank == 2 && tensor.size(0) == params_.requests;
    if (!by_request && !(fits && rank == 2 && tensor.size(0) == params_.rows)) {
      std::ostringstream all;
      if (one_for_all) all << "[" << columns << "], ";
      fail(op_, name, " has shape ", shape_text(tensor), "; expected ", all.str(), "[",
           params_.requests, ", ", columns, "] or [", params_.rows, ", ", columns, "]");
    }
    return {data, columns, tensor.stride(0), tensor.stride(1),
            by_request ? Rows::Per::kRequest : Rows::Per::kBeam};
  }

  const char* op_;
  const Arguments arguments_;
  const LogSoftmaxTopKParams& params_;
};

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
  // Far beyond memory, but within 64 bits.
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
