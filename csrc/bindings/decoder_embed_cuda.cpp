// decoder_embed on CUDA tensors.
#include "bindings/decoder_step_checks_cuda.h"

namespace lmdecode::decoder {
namespace {

void embed(const Tensor& tokens, const Tensor& positions, const Tensor& embedding,
           const OptionalTensor& position_table, double scale, int64_t position_offset,
           const Tensor& x) {
  const char* const op = "decoder_embed";
  check_rank(op, "embedding", embedding, 2, "[vocab, size]");
  check_rank(op, "tokens", tokens, 1, "[rows]");
  const CudaArguments arguments(op, "tokens", tokens);
  StepEmbedParams p;
  p.dtype = float_dtype(op, "embedding", embedding);
  p.rows = tokens.size(0);
  p.vocab = embedding.size(0);
  p.size = embedding.size(1);
  p.tokens = arguments.get<const int64_t>("tokens", tokens, ScalarType::Long, {p.rows});
  p.positions = arguments.get<const int32_t>("positions", positions, ScalarType::Int, {p.rows});
  p.embedding =
      arguments.get<const void>("embedding", embedding, embedding.scalar_type(), {p.vocab, p.size});
  p.position_table = arguments.get_or_null<const float>("position_table", position_table,
                                                        ScalarType::Float, {-1, p.size});
  if (position_table) p.num_positions = position_table->size(0);
  p.x = arguments.get<float>("x", x, ScalarType::Float, {p.rows, p.size});
  p.scale = static_cast<float>(scale);
  p.position_offset = position_offset;
  const CudaGuard guard(tokens);
  decoder_embed_cuda(p, current_cuda_stream(tokens));
}

}  // namespace
}  // namespace lmdecode::decoder

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  m.impl("decoder_embed", TORCH_BOX(&lmdecode::decoder::embed));
}
