// log_softmax_top_k on CPU tensors; with a trie on these alone.
#include "bindings/log_softmax_top_k.h"

#include "bindings/trie_checks.h"

namespace lmdecode::beam {
namespace {

void run(const LogSoftmaxTopKParams& params, const LogitsProcessors* processors, const Tensor&) {
  log_softmax_top_k_cpu(params, processors);
}

using Op = LogSoftmaxTopKOp<run, NoGuard>;

Op::Result held_to_trie(const Tensor& logits, const Tensor& beam_scores, int64_t num_candidates,
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
  const LogSoftmaxTopKParams p =
      log_softmax_top_k_params(logits, beam_scores, num_candidates, num_beams, row_offsets);
  LogitsProcessors processors =
      ProcessorChecks(kLogSoftmaxTopKOp, logits, p)
          .check({sequences, lengths, repetition_penalty, repetition_penalties,
                  no_repeat_ngram_size, no_repeat_ngram_sizes, end_tokens, min_length, min_lengths,
                  suppressed_tokens, forced_tokens, diversity_tokens, diversity_penalty,
                  diversity_penalties, bias, token_bitmask});
  processors.tries.value = token_trie(kLogSoftmaxTopKOp, trie_tokens, child_begin);
  check_trie_tensor(kLogSoftmaxTopKOp, "nodes", nodes, p.rows);
  processors.nodes = nodes.const_data_ptr<int32_t>();
  return Op::launch(p, &processors, logits);
}

}  // namespace
}  // namespace lmdecode::beam

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  using namespace lmdecode;
  using namespace lmdecode::beam;
  m.impl("log_softmax_top_k", TORCH_BOX(&Op::call));
  m.impl("log_softmax_top_k.processed", TORCH_BOX(&Op::processed));
  m.impl("log_softmax_top_k.trie", TORCH_BOX(&held_to_trie));
}
