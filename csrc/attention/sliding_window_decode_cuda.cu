// Launches sliding_window_decode: the parts, then the rows.
#include "attention/attention_kernel_launch.h"
#include "attention/sliding_window_decode.h"
#include "attention/sliding_window_decode_kernel.cuh"

namespace lmdecode::attention {
namespace {

constexpr const char* kOp = "sliding_window_decode";

DecodeLaunch launch_of(const SlidingWindowAttentionParams& params) {
  using namespace cuda_kernels;
  constexpr int kPlainRows = PlainStorage<cuda_tuning::kPlainDecodeRows>::kRows;
  return decode_launch(params, use_tensor_cores(params) ? DecodeShape<64>::kRows : kPlainRows);
}

template <class T>
void launch_tiles(const DecodeLaunch& launch, void* stream) {
  const SlidingWindowAttentionParams& params = launch.params;
  with_compiled_size<64, 128, 256>(max_of(params.head_size, params.value_size), [&](auto size) {
    using Shape = cuda_kernels::DecodeShape<size>;
    cuda_kernels::with_row_kind(params, size, [&](auto kind) {
      const auto kernel = launch.is_whole()
                              ? &cuda_kernels::sliding_window_decode_kernel<T, size, true, kind>
                              : &cuda_kernels::sliding_window_decode_kernel<T, size, false, kind>;
      launch_attention(kOp, kernel, launch.count(), Shape::kThreads,
                       sizeof(cuda_kernels::DecodeStorage<T, size>), launch, stream);
    });
  });
}

template <class T, int... kValueSizes>
void launch_plain(const DecodeLaunch& launch, void* stream) {
  with_compiled_size<kValueSizes...>(launch.params.value_size, [&](auto size) {
    using Storage = cuda_kernels::PlainStorage<cuda_tuning::kPlainDecodeRows>;
    const auto kernel = launch.is_whole() ? &cuda_kernels::plain_decode_kernel<T, size, true>
                                          : &cuda_kernels::plain_decode_kernel<T, size, false>;
    launch_attention(kOp, kernel, launch.count(), cuda_kernels::kPlainThreads, sizeof(Storage),
                     launch, stream);
  });
}

template <class T>
void launch_combine(const DecodeLaunch& launch, void* stream) {
  if (launch.is_whole()) return;
  const int64_t rows = launch.params.sequences * launch.params.kv_heads * launch.partials.rows;
  launch_attention(kOp, &cuda_kernels::combine_parts_kernel<T>, rows, cuda_tuning::kCombineThreads,
                   sizeof(cuda_kernels::CombineStorage), launch, stream);
}

}  // namespace

int64_t sliding_window_decode_cuda_workspace(const SlidingWindowAttentionParams& params) {
  return launch_of(params).workspace();
}

void sliding_window_decode_cuda(const SlidingWindowAttentionParams& params, float* workspace,
                                void* stream) {
  if (params.sequences * params.q_len == 0) return;
  DecodeLaunch launch = launch_of(params);
  set_decode_workspace(workspace, &launch);
  switch (params.dtype) {
    case DType::kFloat32:
      launch_plain<float, 64, 256, 1024>(launch, stream);
      return launch_combine<float>(launch, stream);
    case DType::kFloat16:
      if (use_tensor_cores(params)) {
        launch_tiles<Half>(launch, stream);
      } else {
        launch_plain<Half, 1024>(launch, stream);
      }
      return launch_combine<Half>(launch, stream);
    case DType::kBFloat16:
      if (use_tensor_cores(params)) {
        launch_tiles<BFloat16>(launch, stream);
      } else {
        launch_plain<BFloat16, 1024>(launch, stream);
      }
      return launch_combine<BFloat16>(launch, stream);
  }
}

}  // namespace lmdecode::attention
