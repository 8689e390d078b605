// Launches sliding_window_attention.
#include "attention/attention_tile_launch.h"

namespace lmdecode::attention {
namespace {

constexpr const char* kOp = "sliding_window_attention";

template <class T>
void launch_tiles(const SlidingWindowAttentionParams& params, void* stream) {
  if (needs_score_rule(params)) return launch_attention_tiles_with_rule<T>(params, stream);
  launch_attention_tiles<T, false>(params, stream);
}

template <class T, int... kValueSizes>
void launch_plain(const SlidingWindowAttentionParams& params, void* stream) {
  with_compiled_size<kValueSizes...>(params.value_size, [&](auto size) {
    using Storage = cuda_kernels::PlainStorage<cuda_tuning::kPlainRows>;
    launch_attention(kOp, &cuda_kernels::plain_attention_kernel<T, size>,
                     AttentionTiles::of(params, Storage::kRows).count, cuda_kernels::kPlainThreads,
                     sizeof(Storage), params, stream);
  });
}

}  // namespace

void sliding_window_attention_cuda(const SlidingWindowAttentionParams& params, void* stream) {
  const bool has_rows = params.cu_seqlens_q == nullptr ? params.sequences * params.q_len > 0
                                                       : params.ragged_queries > 0;
  if (!has_rows) return;
  switch (params.dtype) {
    case DType::kFloat32:
      return launch_plain<float, 64, 256, 1024>(params, stream);
    case DType::kFloat16:
      if (use_tensor_cores(params)) return launch_tiles<Half>(params, stream);
      return launch_plain<Half, 1024>(params, stream);
    case DType::kBFloat16:
      if (use_tensor_cores(params)) return launch_tiles<BFloat16>(params, stream);
      return launch_plain<BFloat16, 1024>(params, stream);
  }
}

}  // namespace lmdecode::attention
