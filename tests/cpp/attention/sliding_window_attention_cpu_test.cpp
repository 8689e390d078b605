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

using Kernel = decltype(&default_::attention::sliding_window_attention_tiles);

struct Tiles {
  Kernel run;
  size_t (*bytes)(int64_t rows, int64_t head_size, int64_t value_size) = attention_workspace_bytes;
};

void attend(const Tiles& kernel, const SlidingWindowAttentionParams& p, int64_t tokens) {
  std::vector<AttentionTile> tiles;
  for (int64_t s = 0; s < p.sequences; ++s) {
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      for (int64_t t = 0; t < p.q_len; t += tokens) {
        tiles.push_back({s, h, t, std::min(tokens, p.q_len - t)});
      }
    }
  }
  const int64_t rows = tokens * p.group();
  const size_t bytes = kernel.bytes(rows, p.head_size, p.value_size);
  void* workspace = std::aligned_alloc(64, bytes);
  std::memset(workspace, 0xff, bytes);  // NaN, where it is read before it is written
  kernel.run(p, tiles.data(), 0, static_cast<int64_t>(tiles.size()), rows, workspace);
  std::free(workspace);
  CHECK(!amx_emulation::in_use());
}

// products: the dtype that the kernel multiplies in.
void check_case(const Tiles& run, Case* c, DType products) {
  const int64_t tokens = 1 + c->below(20);
  attend(run, c->p, tokens);
  c->check(tolerance_of(products));
  // Other tiles, the same bits.
  const std::vector<float> lse = c->lse;
  const std::vector<char> out = c->out->copy();
  for (const int64_t others : {c->p.q_len, tokens + 1}) {
    attend(run, c->p, others);
    CHECK(std::memcmp(lse.data(), c->lse.data(), lse.size() * sizeof(float)) == 0);
    CHECK(out == c->out->copy());
  }
  c->p.lse = nullptr;
  attend(run, c->p, tokens);
  CHECK(out == c->out->copy());
  c->p.lse = c->lse.data();
}

void run_cases(const Tiles& run, DType dtype, DType products) {
  for (uint64_t seed = 0; seed < 120; ++seed) {
    check_case(run, random_case(seed, dtype, false).get(), products);
  }
  // Large heads and many keys, of which each is nearer to some queries than the one before, so that
  // the maximum of a row rises in every block: by little, or by what rounds all before to 0.
  const float much = products == DType::kBFloat16 ? 30.0f : 0.2f;
  for (const int64_t size : {80, 128, 256}) {
    for (const float growth : {0.0f, 0.05f, much}) {
      const uint64_t seed = static_cast<uint64_t>(size);
      const std::unique_ptr<Case> c = random_case(seed, dtype, false, 1100, size);
      c->k->set_first(size, [&](size_t row) { return growth * static_cast<float>(row % 1100); });
      c->q->set_first(size, [](size_t row) { return row % 3 == 0 ? -1.0f : 1.0f; });
      check_case(run, c.get(), products);
    }
  }
  const std::unique_ptr<Case> c = case_of_large_scores(dtype, false);
  check_case(run, c.get(), products);
  c->p.scale = 1e-39f;  // subnormal
  check_case(run, c.get(), products);
}

void run_cases(const Tiles& run, DType dtype) { run_cases(run, dtype, dtype); }

void run_all_dtypes(const Tiles& run) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    run_cases(run, dtype);
  }
}

TEST(default_level) { run_all_dtypes({&default_::attention::sliding_window_attention_tiles}); }
#if defined(LMD_HAS_AVX2)
TEST(avx2) {
  if (max_cpu_capability() >= CpuCapability::kAvx2) {
    run_all_dtypes({&avx2::attention::sliding_window_attention_tiles});
  }
}
#endif
#if defined(LMD_HAS_AVX512)
TEST(avx512) {
  if (max_cpu_capability() >= CpuCapability::kAvx512) {
    run_all_dtypes({&avx512::attention::sliding_window_attention_tiles});
  }
}
TEST(avx512_bf16) {
  if (use_avx512_bf16()) {
    run_cases({&avx512_bf16::attention::sliding_window_attention_tiles}, DType::kBFloat16);
  }
}
TEST(avx512_amx_emulated) {
  if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) {
    const Tiles run = {&avx512_amx_emulated::attention::sliding_window_attention_tiles,
                       matrix_attention_bytes};
    run_cases(run, DType::kBFloat16);
    run_cases(run, DType::kFloat32, DType::kBFloat16);
  }
}
#if defined(LMD_HAS_AVX512_AMX)
TEST(avx512_amx) {
  if (use_avx512_amx()) {
    const Tiles run = {&avx512_amx::attention::sliding_window_attention_tiles,
                       matrix_attention_bytes};
    run_cases(run, DType::kBFloat16);
    run_cases(run, DType::kFloat32, DType::kBFloat16);
  }
}
#endif
#endif

}  // namespace
}  // namespace lmdecode::attention::test

CHECK_MAIN()
