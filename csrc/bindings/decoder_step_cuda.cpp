// The ops of a decoder's step on CUDA tensors, which have no CPU kernels: in plain torch they are
// lmdecode.reference.decoder_step.
#include "decoder/decoder_step_cuda.h"

#include "bindings/device.h"

namespace lmdecode::decoder {
namespace {

// Checks caches of a memory, which are read 16 bytes at a time.
void check_source(const char* op, int64_t source) {
  if (source % kAttentionBlock != 0) {
    fail(op, "keys has ", source, " positions; expected a multiple of ", kAttentionBlock);
  }
}

// A cache, which is read 16 bytes at a time.
template <class T>
T* cache_of(const Arguments& arguments, const char* name, const Tensor& tensor, ScalarType type,
            Arguments::Sizes sizes) {
  T* const pointer = arguments.contiguous<T>(name, tensor, sizes, nullptr, type);
  if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) {
    fail(arguments.op(), name, " begins ", reinterpret_cast<uintptr_t>(pointer) % 16,
         " bytes behind a multiple of 16; expected a multiple of 16");
  }
  return pointer;
}

void self_attention(const Tensor& qkv, const Tensor& keys, const Tensor& values,
                    const Tensor& table, const Tensor& positions, const OptionalTensor& bias,
                    double scale, double denominator_epsilon, const Tensor& out) {
  const char* const op = "decoder_self_attention_";
  check_rank(op, "qkv", qkv, 4, "[rows, 3, heads, head size]");
  check_rank(op, "keys", keys, 4, "[rows, heads, capacity, padded head]");
  const Arguments arguments(op, "qkv", qkv);
  StepSelfAttentionParams p;
  p.dtype = float_dtype(op, "qkv", qkv);
  p.rows = qkv.size(0);
  p.capacity = keys.size(2);
  p.shape = {qkv.size(2), qkv.size(3), static_cast<float>(scale),
             static_cast<float>(denominator_epsilon)};
  const ScalarType type = qkv.scalar_type();
  const int64_t heads = p.shape.heads, head_size = p.shape.head_size;
  const auto cache = {p.rows, heads, p.capacity, p.shape.padded_head()};
  p.qkv =
      arguments.contiguous<const void>("qkv", qkv, {p.rows, 3, heads, head_size}, nullptr, type);
  p.out = arguments.contiguous<void>("out", out, {p.rows, heads, head_size}, nullptr, type);
  p.keys = cache_of<void>(arguments, "keys", keys, type, cache);
  p.values = cache_of<void>(arguments, "values", values, type, cache);
  p.table = arguments.contiguous<const int32_t>("table", table, {p.rows, p.capacity});
  p.positions = arguments.contiguous<const int32_t>("positions", positions, {p.rows});
  p.bias = arguments.contiguous<const float>("bias", bias, {heads, -1});
  if (bias) {
    p.bias_stride = bias->size(1);
    if (p.bias_stride < p.capacity) {
      fail(op, "bias has ", p.bias_stride, " distances; expected at least ", p.capacity,
           ", the capacity of keys");
    }
  }
  decoder_self_attention_cuda(p, OnDevice(qkv).stream());
}

void cross_attention(const Tensor& queries, const Tensor& keys, const Tensor& values,
                     const Tensor& lengths, double scale, double denominator_epsilon,
                     const Tensor& out) {
  const char* const op = "decoder_cross_attention";
  check_rank(op, "queries", queries, 3, "[rows, heads, head size]");
  check_rank(op, "keys", keys, 4, "[requests, heads, padded head, source]");
  const Arguments arguments(op, "queries", queries);
  StepCrossAttentionParams p;
  p.dtype = float_dtype(op, "queries", queries);
  p.requests = keys.size(0);
  p.source = keys.size(3);
  check_source(op, p.source);
  const int64_t rows = queries.size(0), heads = queries.size(1), head_size = queries.size(2);
  if (p.requests == 0 ? rows != 0 : rows % p.requests != 0) {
    fail(op, "queries has ", rows, " rows; expected a multiple of the ", p.requests,
         " requests of keys");
  }
  p.request_rows = p.requests == 0 ? 0 : rows / p.requests;
  p.shape = {heads, head_size, static_cast<float>(scale), static_cast<float>(denominator_epsilon)};
  const ScalarType type = queries.scalar_type();
  const int64_t padded = p.shape.padded_head();
  p.queries =
      arguments.contiguous<const void>("queries", queries, {rows, heads, head_size}, nullptr, type);
  p.out = arguments.contiguous<void>("out", out, {rows, heads, head_size}, nullptr, type);
  p.keys =
      cache_of<const void>(arguments, "keys", keys, type, {p.requests, heads, padded, p.source});
  p.values = cache_of<const void>(arguments, "values", values, type,
                                  {p.requests, heads, p.source, padded});
  p.lengths = arguments.contiguous<const int64_t>("lengths", lengths, {p.requests});
  decoder_cross_attention_cuda(p, OnDevice(queries).stream());
}

void cross_cache(const Tensor& key_value, const Tensor& keys, const Tensor& values) {
  const char* const op = "decoder_cross_cache_";
  check_rank(op, "key_value", key_value, 5, "[requests, length, 2, heads, head size]");
  check_rank(op, "keys", keys, 4, "[requests, heads, padded head, source]");
  const Arguments arguments(op, "key_value", key_value);
  StepCrossCacheParams p;
  p.dtype = float_dtype(op, "key_value", key_value);
  p.requests = key_value.size(0);
  p.length = key_value.size(1);
  p.source = keys.size(3);
  check_source(op, p.source);
  const int64_t heads = key_value.size(3), head_size = key_value.size(4);
  if (p.length > p.source) {
    fail(op, "key_value has ", p.length, " positions; expected at most ", p.source,
         ", those of keys");
  }
  p.shape = {heads, head_size, 1.0f, 0.0f};
  const ScalarType type = key_value.scalar_type();
  const int64_t padded = p.shape.padded_head();
  p.key_value = arguments.contiguous<const void>(
      "key_value", key_value, {p.requests, p.length, 2, heads, head_size}, nullptr, type);
  p.keys = cache_of<void>(arguments, "keys", keys, type, {p.requests, heads, padded, p.source});
  p.values =
      cache_of<void>(arguments, "values", values, type, {p.requests, heads, p.source, padded});
  decoder_cross_cache_cuda(p, OnDevice(key_value).stream());
}

void add_norm(const Tensor& x, const OptionalTensor& delta, const OptionalTensor& bias,
              const OptionalTensor& gamma, const OptionalTensor& beta, double epsilon,
              bool rms_norm, bool norm_first, const Tensor& out) {
  const char* const op = "decoder_add_norm_";
  check_rank(op, "x", x, 2, "[rows, size]");
  const Arguments arguments(op, "x", x);
  StepAddNormParams p;
  p.dtype = float_dtype(op, "out", out);
  p.rows = x.size(0);
  p.size = x.size(1);
  const ScalarType type = out.scalar_type();
  p.x = arguments.contiguous<float>("x", x, {p.rows, p.size});
  p.delta = arguments.contiguous<const void>("delta", delta, {p.rows, p.size}, nullptr, type);
  p.bias = arguments.contiguous<const float>("bias", bias, {p.size});
  p.gamma = arguments.contiguous<const float>("gamma", gamma, {p.size});
  p.beta = arguments.contiguous<const float>("beta", beta, {p.size});
  p.out = arguments.contiguous<void>("out", out, {p.rows, p.size}, nullptr, type);
  p.epsilon = static_cast<float>(epsilon);
  p.rms_norm = rms_norm;
  p.norm_first = norm_first;
  decoder_add_norm_cuda(p, OnDevice(x).stream());
}

void embed(const Tensor& tokens, const Tensor& positions, const Tensor& embedding,
           const OptionalTensor& position_table, double scale, int64_t position_offset,
           const Tensor& x) {
  const char* const op = "decoder_embed";
  check_rank(op, "embedding", embedding, 2, "[vocab, size]");
  check_rank(op, "tokens", tokens, 1, "[rows]");
  const Arguments arguments(op, "tokens", tokens);
  StepEmbedParams p;
  p.dtype = float_dtype(op, "embedding", embedding);
  p.rows = tokens.size(0);
  p.vocab = embedding.size(0);
  p.size = embedding.size(1);
  p.tokens = arguments.contiguous<const int64_t>("tokens", tokens, {p.rows});
  p.positions = arguments.contiguous<const int32_t>("positions", positions, {p.rows});
  p.embedding = arguments.contiguous<const void>("embedding", embedding, {p.vocab, p.size}, nullptr,
                                                 embedding.scalar_type());
  p.position_table =
      arguments.contiguous<const float>("position_table", position_table, {-1, p.size});
  if (position_table) p.num_positions = position_table->size(0);
  p.x = arguments.contiguous<float>("x", x, {p.rows, p.size});
  p.scale = static_cast<float>(scale);
  p.position_offset = position_offset;
  decoder_embed_cuda(p, OnDevice(tokens).stream());
}

void activate(const Tensor& up, const OptionalTensor& gate, int64_t activation) {
  const char* const op = "decoder_activate_";
  check_rank(op, "up", up, 2, "[rows, size]");
  if (activation < 1 || activation > 4) {
    fail(op, "activation is ", activation, "; expected 1 to 4");
  }
  const Arguments arguments(op, "up", up);
  StepActivateParams p;
  p.dtype = float_dtype(op, "up", up);
  const ScalarType type = up.scalar_type();
  p.count = up.numel();
  p.up = arguments.contiguous<void>("up", up, {up.size(0), up.size(1)}, nullptr, type);
  p.gate = arguments.contiguous<const void>("gate", gate, {up.size(0), up.size(1)}, nullptr, type);
  p.activation = static_cast<StepActivation>(activation);
  decoder_activate_cuda(p, OnDevice(up).stream());
}

}  // namespace
}  // namespace lmdecode::decoder

LMD_OPS(m) {
  m.impl("decoder_self_attention_", TORCH_BOX(&lmdecode::decoder::self_attention));
  m.impl("decoder_cross_attention", TORCH_BOX(&lmdecode::decoder::cross_attention));
  m.impl("decoder_cross_cache_", TORCH_BOX(&lmdecode::decoder::cross_cache));
  m.impl("decoder_add_norm_", TORCH_BOX(&lmdecode::decoder::add_norm));
  m.impl("decoder_embed", TORCH_BOX(&lmdecode::decoder::embed));
  m.impl("decoder_activate_", TORCH_BOX(&lmdecode::decoder::activate));
}
