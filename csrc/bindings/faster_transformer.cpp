// faster_transformer_decoding_ and gather_tree, on CPU tensors alone.
#include "bindings/decoder_checks.h"
#include "decoder/faster_transformer_search.h"
#include "decoder/gather_tree.h"

namespace lmdecode::decoder {
namespace {

constexpr const char* kFasterTransformerOp = "faster_transformer_decoding_";

// caches: with a request for each memory_rows rows.
std::tuple<Tensor, Tensor, Tensor> faster_transformer_decoding(const Tensor& embedding,
                                                               const Tensor& weights,
                                                               const Tensors& caches,
                                                               const Integers& options) {
  const char* const op = kFasterTransformerOp;
  const auto& model = checked_model<DecoderModel>(op, weights);
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

constexpr const char* kGatherTreeOp = "gather_tree";

template <class T>
void run_gather_tree(const Tensor& step_ids, const Tensor& parent_ids, const Tensor& lengths,
                     int64_t end_token, const Tensor& sequences) {
  GatherTreeParams<T> p;
  p.steps = step_ids.size(0);
  p.batch = step_ids.size(1);
  p.beams = step_ids.size(2);
  p.step_ids = static_cast<const T*>(step_ids.const_data_ptr());
  p.parent_ids = static_cast<const T*>(parent_ids.const_data_ptr());
  p.lengths = static_cast<const T*>(lengths.const_data_ptr());
  p.end_token = static_cast<T>(end_token);
  p.sequences = static_cast<T*>(sequences.mutable_data_ptr());
  const GatherTreeFault fault = gather_tree_cpu(p);
  if (fault.is_found) {
    fail(kGatherTreeOp, "parent_ids of step ", fault.step, ", batch ", fault.batch, " is ",
         fault.parent, "; expected a beam of the same request, 0 to ", p.beams - 1);
  }
}

Tensor gather_tree(const Tensor& step_ids, const Tensor& parent_ids, const Tensor& lengths,
                   int64_t end_token) {
  const char* const op = kGatherTreeOp;
  check_rank(op, "step_ids", step_ids, 3, "[steps, batch, beams]");
  const ScalarType type = dtype_of(step_ids);
  if (type != ScalarType::Int && type != ScalarType::Long) {
    fail(op, "step_ids has dtype ", dtype_name(type), "; expected int32 or int64");
  }
  if (type == ScalarType::Int && end_token != static_cast<int32_t>(end_token)) {
    fail(op, "end_token is ", end_token, "; expected an int32, as step_ids are");
  }
  const int64_t steps = step_ids.size(0), batch = step_ids.size(1), beams = step_ids.size(2);
  const Arguments arguments(op);
  const auto check = [&](const char* name, const Tensor& tensor, Arguments::Sizes sizes) {
    arguments.contiguous<const void>(name, tensor, sizes, nullptr, type);
  };
  check("step_ids", step_ids, {steps, batch, beams});
  check("parent_ids", parent_ids, {steps, batch, beams});
  check("max_sequence_lengths", lengths, {batch});
  Tensor sequences = new_tensor(step_ids, {steps, batch, beams}, type);
  if (type == ScalarType::Int) {
    run_gather_tree<int32_t>(step_ids, parent_ids, lengths, end_token, sequences);
  } else {
    run_gather_tree<int64_t>(step_ids, parent_ids, lengths, end_token, sequences);
  }
  return sequences;
}

}  // namespace
}  // namespace lmdecode::decoder

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("faster_transformer_decoding_",
         TORCH_BOX(&lmdecode::decoder::faster_transformer_decoding));
  m.impl("gather_tree", TORCH_BOX(&lmdecode::decoder::gather_tree));
}
