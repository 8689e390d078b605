// The ops of a decoder's step on CUDA tensors.
#include <optional>
#include <vector>

#include "bindings/cuda_stream.h"
#include "bindings/tensor_checks.h"
#include "decoder/decoder_step_cuda.h"

namespace lmdecode::decoder {
namespace {

using OptionalTensor = std::optional<Tensor>;

// The arguments of one call, all of them contiguous and on the device of the first.
class Arguments {
 public:
  Arguments(const char* op, const char* name, const Tensor& first)
      : op_(op), first_name_(name), first_(first) {
    if (!first.is_cuda()) fail(op, name, " is on ", device_name(first), "; expected cuda");
  }

  // Its pointer; -1 in the shape: any size.
  template <class T>
  T* get(const char* name, const Tensor& tensor, ScalarType type,
         std::initializer_list<int64_t> shape) const {
    check_same_device(op_, name, tensor, first_name_, first_);
    check_dtype(op_, name, tensor, type);
    bool fits = tensor.dim() == static_cast<int64_t>(shape.size()) && tensor.is_contiguous();
    int64_t dim = 0;
    for (const int64_t size : shape) {
      fits = fits && (size < 0 || tensor.size(dim) == size);
      ++dim;
    }
    if (!fits) {
      std::ostringstream expected;
      const char* separator = "";
      for (const int64_t size : shape) {
        expected << separator;
        size < 0 ? expected << "any" : expected << size;
        separator = ", ";
      }
      fail(op_, name, " has shape ", shape_text(tensor), "; expected [", expected.str(),
           "], contiguous");
    }
    return static_cast<T*>(const_cast<void*>(tensor.const_data_ptr()));
  }

  template <class T>
  T* get_or_null(const char* name, const OptionalTensor& tensor, ScalarType type,
                 std::initializer_list<int64_t> shape) const {
    return tensor ? get<T>(name, *tensor, type, shape) : nullptr;
  }

 private:
  const char* op_;
  const char* first_name_;
  const Tensor& first_;
};

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
  p.qkv = arguments.get<const void>("qkv", qkv, type, {p.rows, 3, heads, head_size});
  p.out = arguments.get<void>("out", out, type, {p.rows, heads, head_size});
  p.keys = arguments.get<void>("keys", keys, type, cache);
  p.values = arguments.get<void>("values", values, type, cache);
  p.table = arguments.get<const int32_t>("table", table, ScalarType::Int, {p.rows, p.capacity});
  p.positions = arguments.get<const int32_t>("positions", positions, ScalarType::Int, {p.rows});
  p.bias = arguments.get_or_null<const float>("bias", bias, ScalarType::Float, {heads, -1});
  if (bias) {
    p.bias_stride = bias->size(1);
    if (p.bias_stride < p.capacity) {
      fail(op, "bias has ", p.bias_stride, " distances; expected at least ", p.capacity,
           ", the capacity of keys");
    }
  }
  const CudaGuard guard(qkv);
  decoder_self_attention_cuda(p, current_cuda_stream(qkv));
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
  const int64_t rows = queries.size(0), heads = queries.size(1), head_size = queries.size(2);
  if (p.requests == 0 ? rows != 0 : rows % p.requests != 0) {
    fail(op, "queries has ", rows, " rows; expected a multiple of the ", p.requests,
         " requests of keys");
  }
  p.request_rows = p.requests == 0 ? 0 : rows / p.requests;
  p.shape = {heads, head_size, static_cast<float>(scale), static_cast<float>(denominator_epsilon)};
  const ScalarType type = queries.scalar_type();
  const int64_t padded = p.shape.padded_head();
  p.queries = arguments.get<const void>("queries", queries, type, {rows, heads, head_size});
  p.out = arguments.get<void>("out", out, type, {rows, heads, head_size});
  p.keys = arguments.get<const void>("keys", keys, type, {p.requests, heads, padded, p.source});
  p.values =
      arguments.get<const void>("values", values, type, {p.requests, heads, p.source, padded});
  p.lengths = arguments.get<const int64_t>("lengths", lengths, ScalarType::Long, {p.requests});
  const CudaGuard guard(queries);
  decoder_cross_attention_cuda(p, current_cuda_stream(queries));
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
  const int64_t heads = key_value.size(3), head_size = key_value.size(4);
  if (p.length > p.source) {
    fail(op, "key_value has ", p.length, " positions; expected at most ", p.source,
         ", those of keys");
  }
  p.shape = {heads, head_size, 1.0f, 0.0f};
  const ScalarType type = key_value.scalar_type();
  const int64_t padded = p.shape.padded_head();
  p.key_value = arguments.get<const void>("key_value", key_value, type,
                                          {p.requests, p.length, 2, heads, head_size});
  p.keys = arguments.get<void>("keys", keys, type, {p.requests, heads, padded, p.source});
  p.values = arguments.get<void>("values", values, type, {p.requests, heads, p.source, padded});
  const CudaGuard guard(key_value);
  decoder_cross_cache_cuda(p, current_cuda_stream(key_value));
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
  p.x = arguments.get<float>("x", x, ScalarType::Float, {p.rows, p.size});
  p.delta = arguments.get_or_null<const void>("delta", delta, type, {p.rows, p.size});
  p.bias = arguments.get_or_null<const float>("bias", bias, ScalarType::Float, {p.size});
  p.gamma = arguments.get_or_null<const float>("gamma", gamma, ScalarType::Float, {p.size});
  p.beta = arguments.get_or_null<const float>("beta", beta, ScalarType::Float, {p.size});
  p.out = arguments.get<void>("out", out, type, {p.rows, p.size});
  p.epsilon = static_cast<float>(epsilon);
  p.rms_norm = rms_norm;
  p.norm_first = norm_first;
  const CudaGuard guard(x);
  decoder_add_norm_cuda(p, current_cuda_stream(x));
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
  p.up = arguments.get<void>("up", up, type, {up.size(0), up.size(1)});
  p.gate = arguments.get_or_null<const void>("gate", gate, type, {up.size(0), up.size(1)});
  p.activation = static_cast<StepActivation>(activation);
  const CudaGuard guard(up);
  decoder_activate_cuda(p, current_cuda_stream(up));
}

}  // namespace
}  // namespace lmdecode::decoder

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  m.impl("decoder_self_attention_", TORCH_BOX(&lmdecode::decoder::self_attention));
  m.impl("decoder_cross_attention", TORCH_BOX(&lmdecode::decoder::cross_attention));
  m.impl("decoder_cross_cache_", TORCH_BOX(&lmdecode::decoder::cross_cache));
  m.impl("decoder_add_norm_", TORCH_BOX(&lmdecode::decoder::add_norm));
  m.impl("decoder_embed", TORCH_BOX(&lmdecode::decoder::embed));
  m.impl("decoder_activate_", TORCH_BOX(&lmdecode::decoder::activate));
}
