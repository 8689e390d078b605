// The KV cache ops on CUDA tensors.
#include "bindings/cuda_stream.h"
#include "bindings/kv_cache.h"
#include "bindings/kv_cache_blocks.h"
#include "bindings/kv_cache_indirection.h"
#include "bindings/kv_cache_ring.h"

namespace lmdecode::kv_cache {
namespace {

// The current stream of the device that a tensor is on, which is the current one meanwhile.
class LaunchStream {
 public:
  LaunchStream(const char* op, const char* name, const Tensor& tensor)
      : guard_(on_cuda(op, name, tensor)), stream_(current_cuda_stream(tensor)) {}
  void* get() const { return stream_; }

 private:
  static const Tensor& on_cuda(const char* op, const char* name, const Tensor& tensor) {
    if (!tensor.is_cuda()) {
      fail(op, name, " is on ", device_name(tensor), "; expected the device of the cache");
    }
    return tensor;
  }

  const CudaGuard guard_;
  void* const stream_;
};

void reorder_cache(const std::vector<Tensor>& tensors, const Tensor& parents, int64_t batch_dim,
                   std::optional<int64_t> length_dim, std::optional<int64_t> length) {
  const ReorderArguments arguments(tensors, parents, batch_dim, length_dim, length);
  const LaunchStream stream(kReorderOp, "parents", parents);
  reorder_cache_cuda(arguments.params(), stream.get());
}

void update_beam_indirection(const Tensor& indirection, const Tensor& parents, int64_t length,
                             const std::optional<Tensor>& length_rows) {
  const BeamIndirectionParams params =
      beam_indirection_params(indirection, parents, length, length_rows);
  const LaunchStream stream(kIndirectionOp, "parents", parents);
  update_beam_indirection_cuda(params, stream.get());
}

void ring_cache_append(const Tensor& keys, const Tensor& values, const Tensor& k, const Tensor& v,
                       int64_t position, const std::optional<Tensor>& position_rows,
                       int64_t num_sink_tokens) {
  const RingAppendArguments arguments(keys, values, k, v, position, position_rows, num_sink_tokens);
  const LaunchStream stream(kRingAppendOp, "keys", keys);
  ring_cache_append_cuda(arguments.p, stream.get());
}

void copy_blocks(const std::vector<Tensor>& pools, const Tensor& copies) {
  const CopyBlocksArguments arguments(pools, copies);
  const LaunchStream stream(kCopyBlocksOp, "copies", copies);
  copy_blocks_cuda(arguments.params(), stream.get());
}

}  // namespace
}  // namespace lmdecode::kv_cache

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CUDA, m) {
  m.impl("reorder_cache_", TORCH_BOX(&lmdecode::kv_cache::reorder_cache));
  m.impl("update_beam_indirection_", TORCH_BOX(&lmdecode::kv_cache::update_beam_indirection));
  m.impl("ring_cache_append_", TORCH_BOX(&lmdecode::kv_cache::ring_cache_append));
  m.impl("copy_blocks_", TORCH_BOX(&lmdecode::kv_cache::copy_blocks));
}
