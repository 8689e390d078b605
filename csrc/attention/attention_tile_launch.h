// Launches the tiles of sliding_window_attention on tensor cores: one source file for each of the
// two values of kHasRule, to compile in parallel.
#pragma once

#include "attention/attention_kernel_launch.h"
#include "attention/sliding_window_attention_kernel.cuh"

namespace lmdecode::attention {

template <class T, bool kHasRule>
void launch_attention_tiles(const SlidingWindowAttentionParams& params, void* stream) {
  with_compiled_size<64, 128, 256>(max_of(params.head_size, params.value_size), [&](auto size) {
    using namespace cuda_kernels;
    using Shape = AttentionShape<size>;
    const auto launch = [&](auto kind) {
      launch_attention("sliding_window_attention",
                       &sliding_window_attention_kernel<T, size, kHasRule, kind>,
                       AttentionTiles::of(params, Shape::kRows).count, Shape::kThreads,
                       sizeof(AttentionStorage<T, size>), params, stream);
    };
    if constexpr (kHasRule) {  // its own work dwarfs the branches
      launch(std::integral_constant<RowKind, RowKind::kAny>());
    } else {
      with_row_kind(params, size, launch);
    }
  });
}

// T: Half or BFloat16. In sliding_window_attention_rule_cuda.cu.
template <class T>
void launch_attention_tiles_with_rule(const SlidingWindowAttentionParams& params, void* stream);

}  // namespace lmdecode::attention
