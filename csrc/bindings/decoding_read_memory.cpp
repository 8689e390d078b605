// decoding_read_memory_, on CPU tensors alone.
#include "decoder/decoding_read_memory.h"

#include "bindings/decoder_checks.h"

namespace lmdecode::decoder {
namespace {

constexpr const char* kReadOp = "decoding_read_memory_";

void read_memory(const Tensor& weights, const Tensor& layout, const Integers& config,
                 const Numbers& numbers, const Tensors& caches, const Tensor& memory,
                 const Tensor& lengths, const Tensor& requests) {
  const char* const op = kReadOp;
  const auto& model = checked_model<DecoderLayers>(op, {weights, layout, config, numbers});
  const DecoderConfig& c = model.config;
  const CacheTensors cache(op, caches, c);
  check_rank(op, "memory", memory, 3, "[requests, source, memory_size]");
  check_dtype(op, "memory", memory, ScalarType::Float);
  const int64_t count = memory.size(0), source = memory.size(1);
  if (memory.size(2) != c.memory_size || source > cache.caches.source || !memory.is_contiguous()) {
    fail(op, "memory has shape ", shape_text(memory), "; expected [requests, at most ",
         cache.caches.source, ", ", c.memory_size, "], contiguous");
  }
  check_dtype(op, "lengths", lengths, ScalarType::Long);
  check_shape(op, "lengths", lengths, count);
  check_dtype(op, "requests", requests, ScalarType::Long);
  check_shape(op, "requests", requests, count);
  const int64_t* const length = static_cast<const int64_t*>(lengths.const_data_ptr());
  const int64_t* const request = static_cast<const int64_t*>(requests.const_data_ptr());
  for (int64_t i = 0; i < count; ++i) {
    check_number(op, "lengths", i, length[i * lengths.stride(0)], 0, source);
    check_number(op, "requests", i, request[i * requests.stride(0)], 0, cache.caches.requests - 1);
  }
  ReadMemoryParams p;
  p.config = c;
  p.layers = model.layers.data();
  p.count = count;
  p.source = source;
  p.memory = static_cast<const float*>(memory.const_data_ptr());
  p.lengths = length;
  p.length_stride = lengths.stride(0);
  p.requests = request;
  p.request_stride = requests.stride(0);
  p.cache_requests = cache.caches.requests;
  p.cache_source = cache.caches.source;
  p.cross_keys = cache.cross_keys;
  p.cross_values = cache.cross_values;
  p.memory_lengths = cache.memory_lengths;
  p.cached_lengths = cache.cached_lengths;
  const int64_t bytes = static_cast<int64_t>(read_memory_workspace_bytes(p));
  Tensor workspace = new_tensor(memory, {bytes}, ScalarType::Byte);
  p.workspace = workspace.mutable_data_ptr();
  decoding_read_memory_cpu(p);
}

}  // namespace
}  // namespace lmdecode::decoder

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("decoding_read_memory_", TORCH_BOX(&lmdecode::decoder::read_memory));
}
