// faster_transformer_decoding_, on CPU tensors alone.
#include "bindings/decoder_checks.h"
#include "decoder/faster_transformer_search.h"

namespace lmdecode::decoder {
namespace {

constexpr const char* kFasterTransformerOp = "faster_transformer_decoding_";

// caches: with a request for each memory_rows rows.
std::tuple<Tensor, Tensor, Tensor> faster_transformer_decoding(
    const Tensor& embedding, const Tensor& weights, const Tensor& layout, const Integers& config,
    const Numbers& numbers, const Tensors& caches, const Integers& options) {
  const char* const op = kFasterTransformerOp;
  const auto& model = checked_model<DecoderModel>(op, {weights, layout, config, numbers});
  const CacheTensors cache(op, caches, model.config);
  FasterTransformerParams p;
  p.config = model.config;
  p.weights = model.with(op, embedding);
  p.caches = cache.caches;
  IntegerList list(op, "options", options, 4);
  p.beams = list.next("beam_width", 1);
  p.max_steps = list.next("max_seq_len", 0);
  p.start_token = list.next("start_id", 0, p.config.vocab - 1);
  p.end_token = list.next("end_id", 0, p.config.vocab - 1);
  const int64_t rows = cache.caches.rows;
  if (rows % p.beams != 0) {
    fail(op, "options.beam_width is ", p.beams, "; expected a divisor of ", rows,
         ", the rows of caches");
  }
  p.batch = rows / p.beams;
  p.memory_rows = cache.caches.requests == rows ? 1 : p.beams;
  if (p.memory_rows * cache.caches.requests != rows) {
    fail(op, "caches.cross_keys has ", cache.caches.requests, " requests; expected ", p.batch,
         " or ", rows);
  }
  if (cache.caches.capacity < p.max_steps) {
    fail(op, "caches.self_keys has ", cache.caches.capacity, " positions; expected at least ",
         p.max_steps, ", max_seq_len");
  }
  if (p.weights.positions != nullptr && p.weights.num_positions < p.max_steps) {
    fail(op, "weights.positions has ", p.weights.num_positions, " positions; expected at least ",
         p.max_steps, ", max_seq_len");
  }
  if (p.weights.relative_bias != nullptr && p.weights.num_distances < p.max_steps) {
    fail(op, "weights.relative_bias has ", p.weights.num_distances,
         " distances; expected at least ", p.max_steps, ", max_seq_len");
  }
  for (int64_t request = 0; request < cache.caches.requests; ++request) {
    check_number(op, "caches.memory_lengths", request, cache.memory_lengths[request], 0,
                 cache.caches.source);
  }
  const Tensor& like = caches[0];
  const int64_t bytes = static_cast<int64_t>(faster_transformer_workspace_bytes(p));
  Tensor workspace = new_tensor(like, {bytes}, ScalarType::Byte);
  Tensor output_ids = new_tensor(like, {p.max_steps, rows}, ScalarType::Int);
  Tensor parent_ids = new_tensor(like, {p.max_steps, rows}, ScalarType::Int);
  Tensor lengths = new_tensor(like, {rows}, ScalarType::Int);
  p.workspace = workspace.mutable_data_ptr();
  p.output_ids = static_cast<int32_t*>(output_ids.mutable_data_ptr());
  p.parent_ids = static_cast<int32_t*>(parent_ids.mutable_data_ptr());
  p.sequence_lengths = static_cast<int32_t*>(lengths.mutable_data_ptr());
  const uint8_t failed = faster_transformer_search_cpu(p);
  if (failed != 0) {
    fail(op, "a request has ", (failed & 1) != 0 ? "NaN in its logits" : "no logit above -inf",
         "; expected weights and a memory without NaN or inf");
  }
  return {output_ids, parent_ids, lengths};
}

}  // namespace
}  // namespace lmdecode::decoder

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("faster_transformer_decoding_",
         TORCH_BOX(&lmdecode::decoder::faster_transformer_decoding));
}
