// The CPU kernels of sliding_window_attention at every level; tiles also emulated.
#include "amx_emulation.h"
#include "attention/attention_workspace.h"
#include "attention/sliding_window_attention.h"
#include "attention_case.h"
#include "simd/cpu_capability.h"

#if defined(LMD_HAS_AVX512)
LMD_DECLARE_KERNELS_AT(avx512_amx_emulated, attention,
                       void sliding_window_attention_tiles(
                           const SlidingWindowAttentionParams& params, const AttentionTile* tiles,
                           int64_t begin, int64_t end, int64_t most_rows, void* workspace);)
#endif

namespace lmdecode::attention::test {
namespace {

using Tiles = decltype(&default_::attention::sliding_window_attention_tiles);

void attend(Tiles run, const SlidingWindowAttentionParams& p, int64_t tokens) {
  std::vector<AttentionTile> tiles;
  for (int64_t s = 0; s < p.sequences; ++s) {
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      for (int64_t t = 0; t < p.q_len; t += tokens) {
        tiles.push_back({s, h, t, std::min(tokens, p.q_len - t)});
      }
    }
  }
  const int64_t rows = tokens * p.group();
  const size_t bytes = attention_workspace_bytes(rows, p.head_size, p.value_size);
  void* workspace = std::aligned_alloc(64, bytes);
  std::memset(workspace, 0xff, bytes);  // NaN, where it is read before it is written
  run(p, tiles.data(), 0, static_cast<int64_t>(tiles.size()), rows, workspace);
  std::free(workspace);
  CHECK(!amx_emulation::in_use());
}

// products: the dtype that the kernel multiplies in.
void run_cases(Tiles run, DType dtype, DType products) {
  for (uint64_t seed = 0; seed < 120; ++seed) {
    const std::unique_ptr<Case> c = random_case(seed, dtype, false);
    const int64_t tokens = 1 + c->below(20);
    attend(run, c->p, tokens);
    c->check(tolerance_of(products));
    // Other tiles, the same bits.
    const std::vector<float> lse = c->lse;
    attend(run, c->p, c->p.q_len);
    CHECK(std::memcmp(lse.data(), c->lse.data(), lse.size() * sizeof(float)) == 0);
  }
}

void run_cases(Tiles run, DType dtype) { run_cases(run, dtype, dtype); }

void run_all_dtypes(Tiles run) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    run_cases(run, dtype);
  }
}

TEST(default_level) { run_all_dtypes(&default_::attention::sliding_window_attention_tiles); }
#if defined(LMD_HAS_AVX2)
TEST(avx2) {
  if (max_cpu_capability() >= CpuCapability::kAvx2) {
    run_all_dtypes(&avx2::attention::sliding_window_attention_tiles);
  }
}
#endif
#if defined(LMD_HAS_AVX512)
TEST(avx512) {
  if (max_cpu_capability() >= CpuCapability::kAvx512) {
    run_all_dtypes(&avx512::attention::sliding_window_attention_tiles);
  }
}
TEST(avx512_bf16) {
  if (use_avx512_bf16()) {
    run_cases(&avx512_bf16::attention::sliding_window_attention_tiles, DType::kBFloat16);
  }
}
TEST(avx512_amx_emulated) {
  if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) {
    const Tiles run = &avx512_amx_emulated::attention::sliding_window_attention_tiles;
    run_cases(run, DType::kBFloat16);
    run_cases(run, DType::kFloat32, DType::kBFloat16);
  }
}
#if defined(LMD_HAS_AVX512_AMX)
TEST(avx512_amx) {
  if (use_avx512_amx()) {
    const Tiles run = &avx512_amx::attention::sliding_window_attention_tiles;
    run_cases(run, DType::kBFloat16);
    run_cases(run, DType::kFloat32, DType::kBFloat16);
  }
}
#endif
#endif

}  // namespace
}  // namespace lmdecode::attention::test

CHECK_MAIN()
