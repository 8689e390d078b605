// Launches the attention of a decoder's step.
#include "decoder/step_attention_kernel.cuh"
#include "decoder/step_cuda_launch.h"

namespace lmdecode::decoder {

using namespace step_cuda_kernels;

void decoder_self_attention_cuda(const StepSelfAttentionParams& params, void* stream) {
  launch_step_attention(
      "decoder_self_attention_",
      kernel_of(params.dtype, &decoder_self_attention_kernel<float>,
                &decoder_self_attention_kernel<Half>, &decoder_self_attention_kernel<BFloat16>),
      params, params.rows * params.shape.heads, params.capacity, &self_attention_shared_bytes,
      stream);
}

void decoder_cross_attention_cuda(const StepCrossAttentionParams& params, void* stream) {
  launch_step_attention(
      "decoder_cross_attention",
      kernel_of(params.dtype, &decoder_cross_attention_kernel<float>,
                &decoder_cross_attention_kernel<Half>, &decoder_cross_attention_kernel<BFloat16>),
      params, params.requests * params.shape.heads * cross_groups(params), params.source,
      &cross_attention_shared_bytes, stream);
}

void decoder_cross_cache_cuda(const StepCrossCacheParams& params, void* stream) {
  constexpr const char* kOp = "decoder_cross_cache_";
  const int64_t count =
      params.requests * params.shape.heads * params.shape.padded_head() * params.source;
  if (count == 0) return;
  const CurrentDevice device(kOp);
  launch_step(kOp,
              kernel_of(params.dtype, &decoder_cross_cache_kernel<float>,
                        &decoder_cross_cache_kernel<Half>, &decoder_cross_cache_kernel<BFloat16>),
              params, element_blocks(count, device.multiprocessors), 0, stream);
}

}  // namespace lmdecode::decoder
