// Launches the kernels between the products of a decoder's step.
#include "decoder/step_cuda_launch.h"
#include "decoder/step_rows_kernel.cuh"

namespace lmdecode::decoder {

using namespace step_cuda_kernels;

void decoder_add_norm_cuda(const StepAddNormParams& params, void* stream) {
  constexpr const char* kOp = "decoder_add_norm_";
  if (params.rows == 0 || params.size == 0) return;
  launch_step(kOp,
              kernel_of(params.dtype, &decoder_add_norm_kernel<float>,
                        &decoder_add_norm_kernel<Half>, &decoder_add_norm_kernel<BFloat16>),
              params, params.rows, static_cast<int64_t>(sizeof(StepStorage)), stream);
}

void decoder_embed_cuda(const StepEmbedParams& params, void* stream) {
  constexpr const char* kOp = "decoder_embed";
  if (params.rows * params.size == 0) return;
  const CurrentDevice device(kOp);
  launch_step(kOp,
              kernel_of(params.dtype, &decoder_embed_kernel<float>, &decoder_embed_kernel<Half>,
                        &decoder_embed_kernel<BFloat16>),
              params, element_blocks(params.rows * params.size, device.multiprocessors), 0, stream);
}

void decoder_activate_cuda(const StepActivateParams& params, void* stream) {
  constexpr const char* kOp = "decoder_activate_";
  if (params.count == 0) return;
  const CurrentDevice device(kOp);
  launch_step(kOp,
              kernel_of(params.dtype, &decoder_activate_kernel<float>,
                        &decoder_activate_kernel<Half>, &decoder_activate_kernel<BFloat16>),
              params, element_blocks(params.count, device.multiprocessors), 0, stream);
}

}  // namespace lmdecode::decoder
