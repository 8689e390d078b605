// Compiled once for each CPU capability, with LMD_SIMD naming it.
#include "attention/sliding_window_attention_cpu_kernel.h"

#include "attention/matrix_attention.h"
#include "attention/sliding_window_attention.h"

namespace lmdecode::LMD_SIMD::attention {

using namespace lmdecode::attention;

namespace {

template <class Attention>
void run_tiles(const SlidingWindowAttentionParams& params, const AttentionTile* tiles,
               int64_t begin, int64_t end, int64_t most_rows, void* workspace) {
  Attention attention(params, most_rows, workspace);
  for (int64_t i = begin; i < end; ++i) attention.run(tiles[i]);
}

}  // namespace

void sliding_window_attention_tiles(const SlidingWindowAttentionParams& params,
                                    const AttentionTile* tiles, int64_t begin, int64_t end,
                                    int64_t most_rows, void* workspace) {
#if defined(LMD_SIMD_AVX512_AMX)
  const TileScope scope(matrix_attention_config());
  const auto run = params.dtype == DType::kFloat32 ? &run_tiles<MatrixAttention<float>>
                                                   : &run_tiles<MatrixAttention<BFloat16>>;
  run(params, tiles, begin, end, most_rows, workspace);
#elif defined(LMD_SIMD_AVX512_BF16)
  run_tiles<TileAttention<BFloat16, BFloat16Pairs>>(params, tiles, begin, end, most_rows,
                                                    workspace);
#else
  if (params.has_int8_keys) {
    return run_tiles<TileAttention<float, Floats, Int8Cell>>(params, tiles, begin, end, most_rows,
                                                             workspace);
  }
  with_element_type(params.dtype, [&](auto element) {
    run_tiles<TileAttention<decltype(element), Floats>>(params, tiles, begin, end, most_rows,
                                                        workspace);
  });
#endif
}

}  // namespace lmdecode::LMD_SIMD::attention
