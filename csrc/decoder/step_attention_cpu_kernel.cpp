// Compiled once for each CPU capability, with LMD_SIMD naming it.
#include "decoder/step_attention_cpu_kernel.h"

#include "decoder/step_attention.h"
namespace lmdecode::LMD_SIMD::decoder {

using namespace lmdecode::decoder;

// Items are rows times heads, the heads of a row side by side.
void self_attention_items(const SelfAttentionParams& params, int64_t begin, int64_t end,
                          void* memory) {
  const StepAttention attention(params.shape, params.capacity, memory);
  for (int64_t item = begin; item < end; ++item) {
    attention.self(params, item / params.shape.heads, item % params.shape.heads);
  }
}

// Items are runs times heads.
void cross_attention_items(const CrossAttentionParams& params, int64_t begin, int64_t end,
                           void* memory) {
  const StepAttention attention(params.shape, params.source, memory);
  const int32_t* const runs = params.rows.run_begins;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t run = item / params.shape.heads;
    attention.cross(params, runs[run], runs[run + 1], item % params.shape.heads);
  }
}

int64_t step_attention_scratch(const AttentionShape& shape, int64_t positions) {
  return StepAttention::scratch_floats(shape, positions);
}

}  // namespace lmdecode::LMD_SIMD::decoder
